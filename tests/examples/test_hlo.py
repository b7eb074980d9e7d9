"""The cost of a program is read from its text: one in XLA's notation, counted by hand."""

import hlo
from programs import Program

KIB = 1024
# Of the inputs x has 1 KiB, y 64 bytes and n 4 bytes.
PROGRAM = """HloModule jit_f, is_scheduled=true
%negated (x: f32[256]) -> f32[256] {
  %x = f32[256] parameter(0)
  ROOT %minus = f32[256] negate(%x)
}
%parts (x: f32[256]) -> (f32[16], f32[16], f32[16], f32[16], f32[2]) {
  %x = f32[256] parameter(0)
  %exp = f32[256] exponential(%x)
  %of_exp = f32[16] slice(%exp), slice={[0:16]}
  %i = s32[] constant(3)
  %at_i = f32[16] dynamic-slice(%x, %i), dynamic_slice_sizes={16}
  %rows = f32[4,256] broadcast(%x), dimensions={1}
  %of_rows = f32[16] slice(%rows), slice={[0:16]}
  %ids = s32[16,1] constant({...})
  %gathered = f32[16] gather(%x, %ids)
  %few = f32[32] slice(%x), slice={[0:32]}
  %pairs = f32[2,16] bitcast(%few)
  %sums = f32[2] reduce(%pairs, %i), dimensions={1}, to_apply=%add
  ROOT %all = (f32[16], f32[16], f32[16], f32[16], f32[2]) tuple(%of_exp, %at_i, %of_rows, %gathered, %sums)
}
%in_place (x: f32[256], y: f32[16], n: s32[]) -> (f32[256], f32[256], f32[256], f32[256]) {
  %x = f32[256] parameter(0)
  %y = f32[16] parameter(1)
  %n = s32[] parameter(2)
  %flat = f32[16,16] bitcast(%x)
  %row = f32[1,16] bitcast(%y)
  %new = f32[16,16] dynamic-update-slice(%flat, %row, %n, %n)
  %replaced = f32[256] bitcast(%new)
  %old = f32[16] dynamic-slice(%x, %n), dynamic_slice_sizes={16}
  %sum = f32[16] add(%old, %y)
  %added = f32[256] dynamic-update-slice(%x, %sum, %n)
  %at = s32[1,1] bitcast(%n)
  %scattered = f32[256] scatter(%x, %at, %y), to_apply=%add
  %zero = f32[] constant(0)
  %zeros = f32[256] broadcast(%zero), dimensions={}
  %made = f32[256] dynamic-update-slice(%zeros, %y, %n)
  ROOT %all = (f32[256], f32[256], f32[256], f32[256]) tuple(%replaced, %added, %scattered, %made)
}
%body (state: (s32[], f32[256])) -> (s32[], f32[256]) {
  %state = (s32[], f32[256]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %v = f32[256] get-tuple-element(%state), index=1
  %w = f32[256] negate(%v), backend_config={"window_config":{"estimated_cycles":"30"}}
  ROOT %next = (s32[], f32[256]) tuple(%i, %w)
}
%up_to_five (state: (s32[], f32[256])) -> pred[] {
  %state = (s32[], f32[256]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %c = s32[] constant(5)
  ROOT %go = pred[] compare(%i, %c), direction=LT
}
%depends (state: (s32[], f32[256])) -> pred[] {
  %state = (s32[], f32[256]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %limit = s32[] custom-call(%i)
  ROOT %go = pred[] compare(%i, %limit), direction=LT
}
%much (x: f32[256]) -> f32[256] {
  %x = f32[256] parameter(0)
  %a = f32[256] negate(%x)
  ROOT %b = f32[256] sort(%a), dimensions={0}, to_apply=%less
}
ENTRY %main (x: f32[256], y: f32[16], n: s32[]) -> f32[256] {
  %x = f32[256]{0} parameter(0), sharding={mesh[], [{}]}, metadata={op_name="f(x)"}
  %y = f32[16]{0} parameter(1)
  %n = s32[] parameter(2)
  %c = f32[256]{0} constant({...})
  %sum = f32[256]{0} add(%x, %c)
  %some = (f32[16], f32[16], f32[16], f32[16], f32[2]) fusion(%x), kind=kLoop, calls=%parts
  %new = (f32[256], f32[256], f32[256], f32[256]) fusion(%x, %y, %n), kind=kLoop, calls=%in_place
  %update = f32[256] dynamic-update-slice(%x, %y, %n)
  %slice = f32[16] dynamic-slice(%update, %n), dynamic_slice_sizes={16}
  %at = s32[1,1] bitcast(%n)
  %scatter = f32[256] scatter(%x, %at, %y), to_apply=%add
  %first = (s32[], f32[256]) tuple(%n, %x)
  %l = (s32[], f32[256]) while(%first), condition=%depends, body=%body, x={"known_trip_count":{"n":"7"},"i":{"j":"0"}}
  %m = (s32[], f32[256]) while(%first), condition=%up_to_five, body=%body
  %unknown = (s32[], f32[256]) while(%first), condition=%depends, body=%body
  %either = f32[256] conditional(%n, %x, %x), true_computation=%negated, false_computation=%much
  %branch = f32[256] conditional(%n, %x, %x), branch_computations={%much, %negated}, metadata={op_name="calls=%nobody"}
  %call = f32[256] call(%x), to_apply=%negated
  %odd = (bf16[2,4]{1,0}, /*index=1*/pred[3]{0}, s4[8]{0}, f8e4m3fn[5]{0}, c64[2]{0}, token[], u8[0]{0}) rng()
  %shared = f32[256]{0:S(1)} copy(%x)
  %start = ((f32[256]{0}), f32[256]{0}, u32[]) fusion-start(%x), kind=kLoop, calls=%negated
  %done = f32[256]{0} fusion-done(%start)
  %gemm = (f32[256], s8[4194304]) custom-call(%x, %x), custom_call_target="a product, which takes scratch space"
  %product = f32[256] get-tuple-element(%gemm), index=0
  %fetch = (f32[256]{0:T(256)S(1)}, f32[256]{0:T(256)}, u32[]{:S(2)}) copy-start(%x)
  %on_chip = f32[256]{0:T(256)S(1)} copy-done(%fetch)
  %space = f32[256]{0:T(256)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %store = f32[256]{0:T(256)} add(%on_chip, %space)
  %gather = (f32[256], f32[2048]) all-gather-start(%x), dimensions={0}
  %gathered = f32[2048] all-gather-done(%gather)
  %part = ((f32[256]), f32[32]) reduce-scatter-start(%x), calls=%wrapped
  %parted = f32[32] reduce-scatter-done(%part)
  ROOT %reduce = f32[256] all-reduce(%x), to_apply=%add
}
"""
# Where a kernel is, its bytes and how often it runs; the host is told the predicates.
EXPECTED = [
    ("main/sum", 3 * KIB, 1),
    ("main/some", (4 * 64 + 128) + (4 * 64 + 8), 1),
    ("main/new", (64 + 64 + 4) + (64 + 64 + 2 * 64 + KIB), 1),  # each element is read once; to add is to read
    ("main/update", 64 + 64 + 4, 1),
    ("main/slice", 64 + 64 + 4, 1),
    ("main/scatter", 2 * 64 + 64 + 4, 1),
    ("body/w", 2 * KIB, 7),
    ("body/w", 2 * KIB, 5),
    ("depends/limit", 4 + 4, 3),
    ("depends/go", 4 + 4 + 1, 3),
    ("main/unknown", 1, 3),
    ("body/w", 2 * KIB, 3),
    *[("main/either", 1, 1), ("much/a", 2 * KIB, 1), ("much/b", 2 * KIB, 1)],  # the dearest branch
    *[("main/branch", 1, 1), ("much/a", 2 * KIB, 1), ("much/b", 2 * KIB, 1)],
    ("negated/minus", 2 * KIB, 1),
    ("main/odd", 16 + 3 + 4 + 5 + 16, 1),
    ("main/shared", 2 * KIB, 1),  # memory of a GPU for exchanges, not the chip of a TPU
    ("main/start", 2 * KIB, 1),
    ("main/gemm", 2 * KIB, 1),
    ("main/fetch", KIB, 1),  # what is on the chip of a TPU is free
    ("main/store", KIB, 1),
    ("main/gather", 9 * KIB, 1),
    ("main/part", KIB + 128, 1),
    ("main/reduce", 2 * KIB, 1),
]


def test_kernels_of_a_program():
    program = Program(PROGRAM, 0, unknown_trips=3)
    found = [(kernel.name.partition(":")[0], kernel.bytes_moved, kernel.times) for kernel in program.kernels]
    assert found == EXPECTED
    assert program.cycles == 30 * (7 + 5 + 3)
    assert program.scatters == 2  # inside of kernels too
    exchanges = [("all-gather", "f32[2048]", 1), ("reduce-scatter", "f32[32]", 1), ("all-reduce", "f32[256]", 1)]
    assert program.exchanges == exchanges


def test_received_bytes_are_those_of_all_other_devices():
    expected = {"collective-permute": 16, "all-gather": 14, "all-reduce": 28, "reduce-scatter": 112, "all-to-all": 14}
    on_chip = "bf16[2,4]{1,0:T(8,128)(2,1)S(1)}"
    for kind, received in expected.items():
        assert hlo.received_bytes([(kind, on_chip, 1), (kind, "f32[4]{0}", 2)], 8) == 3 * received
