"""The cost of a program is read from its text: small programs in XLA's notation, counted by hand."""

import hlo
import pytest

KIB = 1024


def program(entry, computations=""):
    head = "HloModule jit_f, is_scheduled=true"
    return f"{head}\n\n{computations}\nENTRY %main.1 (x: f32[256]) -> f32[256] {{\n{entry}\n}}\n"


def fusion(lines, operands="%x", result="f32[256]{0}", inputs="  %x = f32[256]{0} parameter(0)"):
    """A program of one fusion with these lines."""
    entry = f"{inputs}\n  ROOT %out = {result} fusion({operands}), kind=kLoop, calls=%fused"
    return program(entry, f"%fused (p: f32[256]) -> f32[256] {{\n{lines}\n}}\n")


def cost(text, **options):
    kernels = hlo.kernels(text, **options)
    return hlo.bytes_of(kernels), sum(kernel.times for kernel in kernels)


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        ("f32[256]{0}", KIB),
        ("f32[]", 4),
        ("(bf16[2,4]{1,0}, /*index=1*/pred[3]{0}, s4[8]{0}, f8e4m3fn[5]{0}, c64[2]{0})", 16 + 3 + 4 + 5 + 16),
        ("(token[], u8[0]{0})", 0),
        ("f32[8,128]{1,0:T(8,128)}", 4 * KIB),
        ("f32[8,128]{1,0:T(8,128)S(1)}", 0),  # on a TPU's chip
        ("f32[8,128]{1,0:S(1)}", 4 * KIB),  # of a GPU, memory for exchanges
    ],
)
def test_bytes_of_types(type_, expected):
    assert hlo.bytes_of_type(type_) == expected


def test_a_kernel_reads_its_operands_and_writes_its_result():
    text = program("""
  %x = f32[256]{0} parameter(0), sharding={mesh[], [{}]}, metadata={op_name="f(x)"}
  %c = f32[256]{0} constant({...})
  %b = f32[256]{0} bitcast(%x)
  ROOT %sum = f32[256]{0} add(%b, %c), metadata={op_name="calls=%nobody (x)" stack_frame_id=1}""")
    assert cost(text) == (3 * KIB, 1)


def test_an_element_is_read_once_however_many_parts_of_a_kernel_need_it():
    lines = """
  %p = f32[256]{0} parameter(0)
  %exp = f32[256]{0} exponential(%p)
  %half = f32[128]{0} slice(%p), slice={[0:128]}
  %total = f32[] reduce(%exp, %p), dimensions={0}, to_apply=%add
  ROOT %all = (f32[256]{0}, f32[128]{0}, f32[]) tuple(%exp, %half, %total)"""
    text = fusion(lines, result="(f32[256]{0}, f32[128]{0}, f32[])")
    assert cost(text) == (KIB + KIB + KIB / 2 + 4, 1)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("  ROOT %s = f32[16]{0} slice(%p), slice={[0:16]}", 64),
        ("  %e = f32[256]{0} exponential(%p)\n  ROOT %s = f32[16]{0} slice(%e), slice={[0:16]}", 64),
        ("  %c = s32[] constant(3)\n  ROOT %s = f32[16]{0} dynamic-slice(%p, %c), dynamic_slice_sizes={16}", 64),
        ("  %b = f32[4,256]{1,0} broadcast(%p), dimensions={1}\n  ROOT %s = f32[16]{0} slice(%b), slice={[0:16]}", 64),
        ("  %c = s32[16,1]{1,0} constant({...})\n  ROOT %s = f32[16]{0} gather(%p, %c)", 64),
        ("  %r = f32[16,16]{1,0} bitcast(%p)\n  %z = f32[] constant(0)\n  ROOT %s = f32[16]{0} reduce(%r, %z)", KIB),
    ],
)
def test_a_kernel_reads_what_it_needs(lines, expected):
    assert cost(fusion("  %p = f32[256]{0} parameter(0)\n" + lines, result="f32[16]{0}")) == (expected + 64, 1)


UPDATE = """
  %p = f32[256]{0} parameter(0)
  %new = f32[16]{0} parameter(1)
  %i = s32[] parameter(2)
"""
INPUTS = """
  %x = f32[256]{0} parameter(0)
  %y = f32[16]{0} parameter(1)
  %n = s32[] parameter(2)"""


def update(lines):
    return cost(fusion(UPDATE + lines, operands="%x, %y, %n", inputs=INPUTS))


def test_an_update_in_place_writes_the_new_part():
    assert update("  ROOT %u = f32[256]{0} dynamic-update-slice(%p, %new, %i)") == (64 + 64 + 4, 1)
    lines = """
  %flat = f32[16,16]{1,0} bitcast(%p)
  %row = f32[1,16]{1,0} bitcast(%new)
  %u = f32[16,16]{1,0} dynamic-update-slice(%flat, %row, %i, %i)
  ROOT %r = f32[256]{0} bitcast(%u)"""
    assert update(lines) == (64 + 64 + 4, 1)


def test_an_update_in_place_that_adds_reads_what_it_replaces():
    lines = """
  %old = f32[16]{0} dynamic-slice(%p, %i), dynamic_slice_sizes={16}
  %sum = f32[16]{0} add(%old, %new)
  ROOT %u = f32[256]{0} dynamic-update-slice(%p, %sum, %i)"""
    assert update(lines) == (64 + 64 + 64 + 4, 1)


def test_an_update_of_what_the_kernel_makes_writes_all_of_it():
    lines = """
  %zero = f32[] constant(0)
  %zeros = f32[256]{0} broadcast(%zero), dimensions={}
  ROOT %u = f32[256]{0} dynamic-update-slice(%zeros, %new, %i)"""
    assert update(lines) == (KIB + 64 + 4, 1)


def test_updates_and_slices_without_a_fusion():
    text = program(
        INPUTS
        + """
  %u = f32[256]{0} dynamic-update-slice(%x, %y, %n)
  %s = f32[16]{0} dynamic-slice(%u, %n), dynamic_slice_sizes={16}
  ROOT %t = (f32[256]{0}, f32[16]{0}) tuple(%u, %s)"""
    )
    assert cost(text) == ((64 + 64 + 4) + (64 + 64 + 4), 2)


def test_a_scatter_in_place_adds_to_what_it_touches():
    lines = """
  %one = s32[16,1]{1,0} bitcast(%i)
  ROOT %u = f32[256]{0} scatter(%p, %one, %new), to_apply=%add"""
    assert update(lines) == (2 * 64 + 64 + 4, 1)


def loop(attributes, condition):
    computations = f"""
%body (state: (s32[], f32[256])) -> (s32[], f32[256]) {{
  %state = (s32[], f32[256]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %v = f32[256]{{0}} get-tuple-element(%state), index=1
  %w = f32[256]{{0}} negate(%v)
  ROOT %next = (s32[], f32[256]{{0}}) tuple(%i, %w)
}}

%condition (state: (s32[], f32[256])) -> pred[] {{
  %state = (s32[], f32[256]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
{condition}
}}
"""
    return program(
        f"""
  %x = f32[256]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[256]{{0}}) tuple(%zero, %x)
  %loop = (s32[], f32[256]{{0}}) while(%first), condition=%condition, body=%body{attributes}
  ROOT %out = f32[256]{{0}} get-tuple-element(%loop), index=1""",
        computations,
    )


KNOWN = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
CONSTANT = "  %c = s32[] constant(5)\n  ROOT %go = pred[] compare(%i, %c), direction=LT"
DEPENDS = "  %l = s32[] custom-call(%i)\n  ROOT %go = pred[] compare(%i, %l), direction=LT"


def test_a_loop_counts_as_often_as_it_runs():
    assert cost(loop(KNOWN, DEPENDS)) == (7 * 2 * KIB, 7)
    assert cost(loop("", CONSTANT)) == (5 * 2 * KIB, 5)


def test_a_loop_of_unknown_length_asks_the_host():
    # Each time the body, the two kernels of the condition, and the predicate to the host.
    moved, launches = cost(loop("", DEPENDS), unknown_trips=3)
    assert launches == 3 * (1 + 2 + 1)
    assert moved == 3 * (2 * KIB + (4 + 4) + (4 + 4 + 1) + 1)


CONDITIONAL = program(
    """
  %x = f32[256]{0} parameter(0)
  %p = pred[] parameter(1)
  ROOT %out = f32[256]{0} conditional(%p, %x, %x), true_computation=%much, false_computation=%little""",
    """
%much (x: f32[256]) -> f32[256] {
  %x.1 = f32[256]{0} parameter(0)
  %a = f32[256]{0} negate(%x.1)
  ROOT %b = f32[256]{0} sort(%a), dimensions={0}, to_apply=%less
}

%little (x: f32[256]) -> f32[256] {
  %x.2 = f32[256]{0} parameter(0)
  ROOT %a.1 = f32[256]{0} negate(%x.2)
}
""",
)


def test_the_dearest_branch_of_a_conditional_counts_and_what_a_call_calls():
    assert cost(CONDITIONAL) == (4 * KIB + 1, 3)
    by_number = CONDITIONAL.replace(
        "true_computation=%much, false_computation=%little", "branch_computations={%much, %little}"
    )
    assert cost(by_number) == cost(CONDITIONAL)
    called = CONDITIONAL.replace(
        "conditional(%p, %x, %x), true_computation=%much, false_computation=%little", "call(%x), to_apply=%much"
    )
    assert cost(called) == (4 * KIB, 2)


def test_asynchronous_kernels_count_once():
    text = program(
        """
  %x = f32[256]{0} parameter(0)
  %start = ((f32[256]{0}), f32[256]{0}, u32[]) fusion-start(%x), kind=kLoop, calls=%fused
  %done = f32[256]{0} fusion-done(%start)
  %copied = (f32[256]{0}, f32[256]{0}, u32[]) copy-start(%done)
  ROOT %end = f32[256]{0} copy-done(%copied)""",
        "%fused (p: f32[256]) -> f32[256] {\n  %p = f32[256]{0} parameter(0)\n  ROOT %e = f32[256]{0} negate(%p)\n}\n",
    )
    assert cost(text) == (2 * KIB + 2 * KIB, 2)


def test_scratch_space_of_a_library_does_not_count():
    text = program("""
  %x = f32[256]{0} parameter(0)
  %call = (f32[256]{0}, s8[4194304]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  ROOT %out = f32[256]{0} get-tuple-element(%call), index=0""")
    assert cost(text) == (2 * KIB, 1)


def test_arrays_on_the_chip_of_a_tpu_are_free():
    text = program("""
  %x = f32[256]{0:T(256)} parameter(0)
  %begin = (f32[256]{0:T(256)S(1)}, f32[256]{0:T(256)}, u32[]{:S(2)}) copy-start(%x)
  %here = f32[256]{0:T(256)S(1)} copy-done(%begin)
  %space = f32[256]{0:T(256)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %out = f32[256]{0:T(256)} add(%here, %space)""")
    assert cost(text) == (KIB + KIB, 2)


def test_cycles_are_those_that_the_compiler_of_a_tpu_estimates_for_each_turn_of_a_loop():
    estimate = 'backend_config={"window_config":{"estimated_cycles":"30"}}'
    text = loop(KNOWN, DEPENDS).replace("negate(%v)", f"negate(%v), {estimate}")
    assert sum(kernel.cycles * kernel.times for kernel in hlo.kernels(text)) == 7 * 30


def test_exchanges_between_devices():
    text = program(
        """
  %x = f32[256]{0} parameter(0)
  %a = (f32[256]{0}, f32[2048]{0}) all-gather-start(%x), dimensions={0}
  %b = f32[2048]{0} all-gather-done(%a)
  %s = ((f32[256]{0}), f32[32]{0}) reduce-scatter-start(%x), calls=%wrapped
  %t = f32[32]{0} reduce-scatter-done(%s)
  ROOT %r = f32[256]{0} all-reduce(%x), to_apply=%add""",
        "%wrapped (x: f32[256]) -> f32[32] {\n  %x.1 = f32[256]{0} parameter(0)\n"
        "  ROOT %w = f32[32]{0} reduce-scatter(%x.1), to_apply=%add\n}\n",
    )
    assert sorted(hlo.exchanges(hlo.kernels(text))) == [
        ("all-gather", "f32[2048]{0}", 1),
        ("all-reduce", "f32[256]{0}", 1),
        ("reduce-scatter", "f32[32]{0}", 1),
    ]


@pytest.mark.parametrize(
    ("kind", "received"),
    [("collective-permute", 16), ("all-gather", 14), ("all-reduce", 28), ("reduce-scatter", 112), ("all-to-all", 14)],
)
def test_received_bytes_are_those_of_all_other_devices(kind, received):
    on_chip = "bf16[2,4]{1,0:T(8,128)(2,1)S(1)}"
    assert hlo.received_bytes([(kind, on_chip, 1), (kind, "f32[4]{0}", 2)], 8) == 3 * received
