#!/usr/bin/env python3
"""What the tile loop of each attend_matrix kernel for gfx942 asks of a compute unit.

    counts.py OBJDUMP CODE.co...

Counts instructions on the way through one tile that needs no mask: of all ways through the loop the
one with the most matrix products and loads, and of those the shortest. Prints a row of a Markdown
table a kernel, as docs/benchmarks/amd-predicted.md has it. The rates are those from which AMD's
published peaks follow; nothing here was measured on a device.
"""
import re
import subprocess
import sys

WIDTH = 64  # lanes of a wave
SIMDS = 4  # of a compute unit, each with waves of its own
PRODUCT_CYCLES = 16  # 16 x 16 x 16 of bf16: 1,307 TFLOP/s of 304 units at 2.1 GHz
VECTOR_CYCLES = 4  # a SIMD has 16 lanes
LDS_BYTES = 128  # a cycle, of a compute unit
UNIT_LDS = 64 << 10
REGISTERS = 512  # of a lane, vector and accumulation together

BYTES = {"b64": 8, "b96": 12, "b128": 16}  # else 4: a bank gives no less at once


def functions(objdump, code):
    """name -> [(address, mnemonic, target or None)]"""
    text = subprocess.run([objdump, "-d", "--triple=amdgcn-amd-amdhsa", "--mcpu=gfx942", code],
                          check=True, capture_output=True, text=True).stdout
    all_functions, name = {}, None
    for line in text.splitlines():
        head = re.match(r"^([0-9a-f]+) <(\S+)>:", line)
        if head:
            name = head.group(2)
            all_functions[name] = []
            start = int(head.group(1), 16)
            continue
        m = re.match(r"^\t(\S+).*// ([0-9A-F]+): ", line)
        if not m or name is None:
            continue
        target = re.search(r"<\S+?\+0x([0-9a-f]+)>", line) if m.group(1).startswith("s_") else None
        all_functions[name].append((int(m.group(2), 16), m.group(1),
                                    start + int(target.group(1), 16) if target else None))
    return all_functions


def kind(mnemonic):
    if "mfma" in mnemonic:
        return "products"
    for prefix, what in (("v_", "vector"), ("global_load", "loads"), ("ds_", "lds"), ("s_", "scalar")):
        if mnemonic.startswith(prefix):
            return what
    return "other"


def edges(code):
    """For each instruction those that may follow it."""
    index = {a: i for i, (a, _, _) in enumerate(code)}
    after = []
    for i, (_, m, t) in enumerate(code):
        nexts = [i + 1] if i + 1 < len(code) and m not in ("s_branch", "s_endpgm") else []
        after.append(nexts + ([index[t]] if t in index else []))
    return after


def tile_loop(code):
    """The smallest loop around all matrix products: its first instruction, and all, by number."""
    after = edges(code)
    before = [[] for _ in code]
    for i, nexts in enumerate(after):
        for n in nexts:
            before[n].append(i)
    products = {i for i, (_, m, _) in enumerate(code) if kind(m) == "products"}
    loops = []
    for last, nexts in enumerate(after):
        for first in nexts:
            if first > min(products) or last < max(products):
                continue
            body, todo = {first, last}, [last]
            while todo:
                todo += [b for b in before[todo.pop()] if b not in body and not body.add(b)]
            if products <= body:
                loops.append((len(body), first, body))
    return min(loops)[1:]


def path_through(code, first, body):
    """The way through the loop with the most products, then loads, then the fewest instructions,
    inner loops once: its instructions by kind, and bytes a lane moves to and from LDS."""
    after, best, is_open = edges(code), {}, set()
    todo = [(first, False)]
    while todo:
        i, is_left = todo.pop()
        if is_left:
            own = (kind(code[i][1]) == "products", kind(code[i][1]) == "loads", -1)
            ways = [(own, None)] if first in after[i] else []
            ways += [(tuple(x + y for x, y in zip(own, best[n][0])), n)
                     for n in after[i] if n in best and n not in is_open]
            is_open.discard(i)
            if ways:
                best[i] = max(ways, key=lambda w: w[0])
        elif i not in is_open and i not in best:
            is_open.add(i)
            todo.append((i, True))
            todo += [(n, False) for n in after[i] if n in body and n != first]
    counts, lds_bytes, i = {}, 0, first
    while i is not None:
        m = code[i][1]
        counts[kind(m)] = counts.get(kind(m), 0) + 1
        if m.startswith("ds_") and m.split("_")[1] in ("read", "write"):
            pair = 2 if "read2" in m or "write2" in m else 1
            lds_bytes += pair * BYTES.get(m.split("_")[-1], 4)
        i = best[i][1]
    return counts, lds_bytes


def registers(objdump, code):
    """name -> vector registers, accumulation among them"""
    readelf = re.sub(r"objdump", "readelf", objdump)
    text = subprocess.run([readelf, "--notes", code], check=True, capture_output=True, text=True).stdout
    names = re.findall(r"\.name: +(\S+)", text)
    names = [n for n in names if n.startswith("_Z")]
    return dict(zip(names, map(int, re.findall(r"\.vgpr_count: +(\d+)", text))))


def shape(dim, row_warps, is_quantised):
    """matrix_config of attend_matrix.cuh with tile_mfma.h's matrix_tile: tokens, waves, LDS bytes"""
    tile = 32 if dim == 128 and row_warps == 4 and is_quantised else \
        64 if dim < 256 else 16 if row_warps == 4 else 32
    waves = row_warps * (tile // 16 if row_warps == 1 else 1)
    q, part = 16 * row_warps * dim * 2, tile * dim * 2
    stage = 2 * tile * dim + 8 * tile if is_quantised else 2 * part
    lds = q + (2 * part if is_quantised else 0) + stage
    sl = dim if waves > row_warps else 64
    return tile, waves, max(lds, q + waves * 16 * ((sl + 4) * 4 + 8)) + 256


def main():
    objdump = sys.argv[1]
    for code in sys.argv[2:]:
        vgprs = registers(objdump, code)
        for name, body in functions(objdump, code).items():
            m = re.search(r"matrix_configILb1ELb([01])ELi(\d+)ELi(\d)E", name)
            if not m:
                continue
            is_quantised, dim, row_warps = m.group(1) == "1", int(m.group(2)), int(m.group(3))
            tile, waves, lds = shape(dim, row_warps, is_quantised)
            n, lds_bytes = path_through(body, *tile_loop(body))
            expected = 2 * (tile // (waves // row_warps) // 16) * (dim // 16)
            assert n["products"] == expected, (name, n, expected)
            blocks = min(UNIT_LDS // lds, REGISTERS // -(-vgprs[name] // 8 * 8) * SIMDS // waves)
            products = n["products"] * PRODUCT_CYCLES
            vector = n.get("vector", 0) * VECTOR_CYCLES
            # of the compute unit, for the waves that a SIMD has of one block
            on_lds = lds_bytes * WIDTH / LDS_BYTES * SIMDS
            bound = max((products, "products"), (vector, "vector"), (on_lds, "LDS"))
            alone = products + vector + on_lds
            print(f"| {dim} | {16 * row_warps} | {'codes' if is_quantised else '16 bit'} | {tile} | "
                  f"{n['products']} | {n.get('vector', 0)} | {n.get('lds', 0)} | {n.get('scalar', 0)} | {lds_bytes} | "
                  f"{n.get('loads', 0)} | {vgprs[name]} | {blocks * waves / SIMDS:g} | "
                  f"{products} / {vector} / {on_lds:.0f} | {bound[1]} | "
                  f"{100 * products / bound[0]:.0f} | {100 * products / alone:.0f} |")


main()
