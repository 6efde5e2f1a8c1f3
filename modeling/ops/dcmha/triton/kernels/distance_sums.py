"""The kernel of `dcmha_triton` that sums maps over all pairs of the same distance, for the gradients of tables.

`DESIGN.md`, "Tables by distance", has its memory and the reasons.
"""

from .tiles import bound, tl, triton

# What runs on the device is typed by Triton's compiler.
# mypy: disable-error-code="no-untyped-def"


@triton.jit
def dcmha_distance_sums(
    maps,  # [items, H, c, n]
    partial,  # [items * H, parts, step + n - 1], float32, written
    sizes,
    where,
    part,  # queries of a program
    block_t: tl.constexpr,
    block_x: tl.constexpr,
):
    """The sums of one head's map over some queries: `x = s - t % step + step - 1` is the column of key `s`, query `t`.

    In chunks without blocks `step` is the number of all queries.
    """
    step = sizes.queries
    if where.step is not None:
        step = where.step
    columns = step + sizes.keys - 1
    # Planes and blocks of columns are both along the first side of the grid, which takes any number of programs.
    blocks = tl.cdiv(columns, block_x)
    plane, x = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * block_x + tl.arange(0, block_x)
    total = tl.zeros([block_t, block_x], tl.float32)
    first = tl.program_id(1) * part
    for start in range(0, bound(part), block_t):
        t = first + start + tl.arange(0, block_t)
        s = x[None, :] + (t % step)[:, None] - (step - 1)
        inside = (s >= 0) & (s < sizes.keys) & (t < sizes.queries)[:, None]
        place = maps + plane * sizes.queries * sizes.keys + (t[:, None] * sizes.keys + s)
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    place = partial + (plane * tl.num_programs(1) + tl.program_id(1)) * columns + x
    tl.store(place, tl.sum(total, axis=0), mask=x < columns)


DISTANCE_KERNELS = {"dcmha_distance_sums": dcmha_distance_sums}
