"""The generation example: a cache gives what the full forward pass gives, however prompts and places are arranged."""

import jax
import language_model
import numpy as np
import pytest
from generate import Generator, empty_cache, generate, generate_without_cache, prefill

CONFIG = language_model.Config(vocabulary=300, length=64, width=16, heads=2, layers=2)
PROMPTS = [[5, 9, 200, 31, 8, 77, 120], [42], [11, 250, 3], [7] * 12, [90, 91, 92, 93, 94]]
MOST, CHUNK = 8, 4


@pytest.fixture(scope="module")
def trainer():
    trainer = language_model.Trainer(CONFIG)
    # Untrained, but with weights large enough that the next token depends on all tokens before it.
    trainer.params = jax.tree.map(lambda x: 4 * x, trainer.params)
    return trainer


def generator_of(trainer, window=None):
    return Generator(trainer.graph, trainer.params, window)


@pytest.fixture(scope="module")
def expected(trainer):
    return [generate_without_cache(trainer, trainer.params, p, MOST, CONFIG.length) for p in PROMPTS]


def tokens_of(texts):
    return [text.generated for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_continuous_batching_gives_the_tokens_of_the_full_forward_pass(trainer, expected, rows):
    generator = generator_of(trainer)
    texts, made = generate(generator, empty_cache(CONFIG, rows, 24), PROMPTS, MOST, CHUNK)
    assert tokens_of(texts) == expected
    assert made == sum(map(len, expected))
    assert len({tuple(generated) for generated in expected}) > 2  # else the test would see nothing
    assert generator.advance._cache_size() == 2  # chunks of prompts, and single tokens


def test_garbage_in_the_cache_changes_no_bit(trainer):
    generator, logits = generator_of(trainer), []
    for garbage in (0.0, np.nan, np.inf):
        cache, following = prefill(generator, empty_cache(CONFIG, 5, 24, garbage), PROMPTS, CHUNK)
        at = np.array([[len(prompt)] for prompt in PROMPTS])
        logits.append(generator.advance(trainer.params, cache, following[:, None], at)[1])
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 12])
def test_prompts_in_chunks_of_any_size(trainer, expected, chunk):
    _, following = prefill(generator_of(trainer), empty_cache(CONFIG, 5, 24), PROMPTS, chunk)
    assert following.tolist() == [generated[0] for generated in expected]


@pytest.mark.slow
def test_a_window_with_a_rotating_cache(trainer, expected):
    """Of as many places as the window, and a chunk, need; against one in which nothing is written twice."""

    def texts(window, places):
        found, _ = generate(generator_of(trainer, window), empty_cache(CONFIG, 2, places), PROMPTS, MOST, CHUNK)
        return tokens_of(found)

    assert texts(5, 5 + CHUNK - 1) == texts(5, 40)
    assert texts(2, 40) != expected  # the window matters
