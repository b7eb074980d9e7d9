"""Programs of one op at a time."""

import jax

last = None


def pytest_runtest_setup(item):
    """Hundreds of compiled programs in a process are more than the memory maps that Linux grants it."""
    global last
    key = item.callspec.params.get("key") if hasattr(item, "callspec") else None
    if key not in (None, last) and "exhaustive" in item.config.option.markexpr.replace("not exhaustive", ""):
        jax.clear_caches()
    last = key or last
