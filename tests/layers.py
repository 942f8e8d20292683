#!/usr/bin/env python3
"""Holds the rules of docs/design.md, section 2: which file may know which, and of what there is one.

  tests/layers.py [SOURCE_DIR]   checks the tree; every breach is named, exit 1
  tests/layers.py --self-check   plants breaches in a scratch tree and expects each to be named
  tests/layers.py --arrows       prints which folder of the tree uses which, and through which files

An include is judged by its folder: "cache/kv.h" is cache's. Quoted includes without a folder are the
file's own folder's, angle brackets are the system's unless they name one of our folders.

A file and its header are one room. A room uses another if it includes its header or names something
that only the other defines; the rules are about both kinds of use. A file without a header of its
own that implements a part of another's does not use that one by including it.
"""
import os
import re
import sys
import tempfile

AREAS = ("cache", "kernels", "proto", "clients", "daemon", "tests")
CODE = (".c", ".h", ".cpp", ".cu", ".cuh", ".hip")
SHARED = tuple(f"proto/attn_{name}.h" for name in ("half", "merge", "time", "types"))
MAX_FILES = 40  # of a folder
# From the top: a folder uses those below it. Folders of one line do not use each other.
LAYERS = (
    ("daemon/process",),
    ("daemon/transport", "daemon/http"),
    ("daemon/cards",),
    ("daemon/cards/split",),
    ("daemon/engine",),
    ("daemon/engine/operator",),
    ("daemon/engine/seq",),
    ("daemon/engine/pool",),
    ("daemon/engine/step",),
    ("daemon/engine/tier",),
    ("daemon/engine/core",),
    ("daemon/keeper",),
    ("daemon/request",),
    ("daemon/config",),
    ("daemon/base",),
)
# Rooms that use each other and are one thing in several files: a connection's reading, writing and
# TLS with its listener; clients in shared memory with theirs.
GROUPS = (
    {"daemon/transport/" + name for name in ("sp", "sp_internal", "sp_peer", "sp_tls", "sp_write")},
    {"daemon/transport/" + name for name in ("gpu", "shm", "shm_client", "shm_internal", "shm_region")},
)
# What only these folders may include; a header whose name ends in internal.h is its own folder's.
INSIDES = {
    "daemon/engine/core/state.h": ("daemon/engine", "daemon/cards"),
    "daemon/config/option.h": ("daemon/config",),
}
# what there is one of: what it looks like, where it is
ONCE = (
    (r"\b(clock_gettime|gettimeofday)\s*\(|[^\w]time\(NULL\)|\battn_now_ns\b",
     "reads a clock by itself", ("daemon/",), ("daemon/base/clock.c",)),
    (r"\bclock_gettime\s*\(|\bgettimeofday\s*\(", "reads a clock by itself",
     ("cache/", "kernels/", "clients/", "proto/"), ("proto/attn_time.h",)),
    (r"\b(if|while) \([^;{]*\bstats_get\(", "decides by a statistic", ("daemon/",), ()),
    (r"__builtin_ia32_pause|_mm_pause|\"yield\"", "has a pause of its own",
     ("cache/", "kernels/", "clients/", "proto/", "daemon/"), ("proto/attn_time.h",)),
    (r"compare_exchange\w*\s*\([^;]*\bnext\b", "pushes to a stack by itself",
     ("cache/", "kernels/", "clients/", "daemon/"), ()),
)


def without_comments(text):
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def room(path):
    return os.path.splitext(path)[0]


class Tree:
    def __init__(self, root):
        self.text = {}
        self.n_files = {}
        for area in AREAS[:5]:
            for folder, _, names in os.walk(os.path.join(root, area)):
                folder = os.path.relpath(folder, root)
                self.n_files[folder] = len(names)
                for name in names:
                    if name.endswith(CODE):
                        path = os.path.join(folder, name)
                        with open(os.path.join(root, path), encoding="utf-8") as f:
                            self.text[path] = without_comments(f.read())

    def includes(self, path):
        """(line, file as seen from the root)"""
        for i, line in enumerate(self.text[path].split("\n"), 1):
            m = re.match(r"\s*#\s*include\s*([\"<])([^\">]*)[\">]", line)
            if m is None:
                continue
            name = m.group(2)
            if name == "attnd.pb-c.h":
                name = "proto/attnd.pb-c.h"  # generated from proto/
            elif ".." in name.split("/") or (m.group(1) == '"' and "/" not in name):
                name = os.path.normpath(os.path.join(os.path.dirname(path), name))
            yield i, name


# --- includes ----------------------------------------------------------------------------------


def may_include(path, included):
    of, to = path.split("/")[0], included.split("/")[0]
    if of == to or included in SHARED:
        return True
    if of == "daemon":
        return to in ("cache", "kernels", "proto")
    if of == "clients":  # attnload verifies what it got against the float64 reference
        return to == "proto" or (path.startswith("clients/attnload") and
                                 included == "kernels/reference.h")
    return False


def may_look(path, included):
    if included in INSIDES:
        inside = INSIDES[included]
    elif included.endswith("internal.h"):
        inside = (os.path.dirname(included),)
    else:
        return True
    return any((path + "/").startswith(folder + "/") for folder in inside)


def include_breaches(tree):
    for path in tree.text:
        for line, included in tree.includes(path):
            if "/" not in included or included.split("/")[0] not in AREAS:
                continue
            if not may_include(path, included):
                yield f"{path}:{line}: includes {included}"
            elif not may_look(path, included):
                yield f"{path}:{line}: looks into {included}"


# --- rooms -------------------------------------------------------------------------------------


def program(path):
    """Of clients/ each folder is a program of its own, whose names may be those of another."""
    parts = path.split("/")
    return "/".join(parts[:2 if parts[0] == "clients" else 1])


def calls(tree):
    """{file: {file: a name}}: which C file uses what only another one of its program defines."""
    defined, twice = {}, set()
    files = [p for p in tree.text if p.endswith(".c")]
    for path in files:
        for m in re.finditer(r"^(?!static|#|typedef|extern)[A-Za-z_][\w \*]*?\b(\w+)(?:\([^;{]*\)\s*\{"
                             r"|(?:\[[^\]]*\])* = )", tree.text[path], re.M):
            name = (program(path), m.group(1))
            twice |= {name} if defined.get(name, path) != path else set()
            defined[name] = path
    found = {}
    for path in files:
        found[path] = {}
        text = re.sub(r"\"(\\.|[^\"\\\n])*\"", '""', tree.text[path])
        for word in set(re.findall(r"(?<![.\w])(?<!->)(?<!struct )[A-Za-z_]\w*", text)):
            name = (program(path), word)
            if name not in defined or name in twice or defined[name] == path:
                continue
            if not re.search(r"^static [^;={]*\b" + word + r"\(", text, re.M):
                found[path].setdefault(defined[name], word)
    return found


def implements(tree, path, header):
    """A C file without a header of its own defines something that this header declares."""
    if not path.endswith(".c") or room(path) + ".h" in tree.text:
        return False
    names = re.findall(r"^(?!static|#|typedef|extern)[A-Za-z_][\w \*]*?\b(\w+)\(", tree.text[path], re.M)
    return any(re.search(r"\b" + name + r"\(", tree.text[header]) for name in names)


def uses(tree):
    """{room: {room: why}}"""
    arrows = {}
    for path in tree.text:
        of = arrows.setdefault(room(path), {})
        for _, included in tree.includes(path):
            if included in tree.text and room(included) != room(path) and \
                    not implements(tree, path, included):
                of.setdefault(room(included), "#include")
    for path, names in calls(tree).items():
        for other, name in names.items():
            arrows[room(path)].setdefault(room(other), name)
            if arrows[room(path)][room(other)] == "#include":
                arrows[room(path)][room(other)] = name
    return arrows


def circles(arrows):
    """Strongly connected parts of more than one node (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in sorted(arrows.get(v, ())):
            if w not in index:
                visit(w)
            if w in stack:
                low[v] = min(low[v], low[w])
        if low[v] == index[v]:
            part = []
            while not part or part[-1] != v:
                part.append(stack.pop())
            if len(part) > 1:
                found.append(set(part))

    sys.setrecursionlimit(10000)
    for v in sorted(arrows):
        if v not in index:
            visit(v)
    return found


def room_breaches(tree):
    arrows = uses(tree)
    for circle in circles(arrows):
        if any(circle <= group for group in GROUPS):
            continue
        names = ", ".join(f"{a} -> {b} ({arrows[a][b]})" for a in sorted(circle)
                          for b in sorted(arrows[a]) if b in circle)
        yield f"{len(circle)} rooms use each other in a circle: {names}"
    rank = {folder: i for i, line in enumerate(LAYERS) for folder in line}
    for a in arrows:
        of = os.path.dirname(a)
        for b, name in arrows[a].items():
            to = os.path.dirname(b)
            if of != to and of in rank and to in rank and rank[to] <= rank[of]:
                yield f"{a} uses {b} ({name}), which is not below it"


def folder_breaches(tree):
    known = {folder for line in LAYERS for folder in line}
    for folder, n in tree.n_files.items():
        if n > MAX_FILES:
            yield f"{folder}/ has {n} files, more than {MAX_FILES}"
    for folder in sorted({os.path.dirname(p) for p in tree.text if p.startswith("daemon/")} - known):
        yield f"{folder}/ has no layer"


def once_breaches(tree):
    for pattern, what, folders, home in ONCE:
        for path, text in tree.text.items():
            if not path.startswith(folders) or path in home:
                continue
            for m in re.finditer(pattern, text):
                yield f"{path}:{text.count(chr(10), 0, m.start()) + 1}: {what}"


def breaches(root):
    tree = Tree(root)
    return [*include_breaches(tree), *room_breaches(tree), *folder_breaches(tree), *once_breaches(tree)]


def print_arrows(root):
    arrows, folders = uses(Tree(root)), {}
    for a in sorted(arrows):
        for b, name in sorted(arrows[a].items()):
            of, to = os.path.dirname(a), os.path.dirname(b)
            if of != to:
                folders.setdefault((of, to), []).append(f"{a} -> {b} ({name})")
    for (of, to), list_of in sorted(folders.items()):
        print(f"{of} -> {to}: {len(list_of)}")
        for line in list_of:
            print("    " + line)


# --- planted breaches --------------------------------------------------------------------------

ALLOWED = {
    "daemon/engine/a.c": '#include "cache/kv.h"\nvoid a_run(void)\n{\n    b_run();\n}',
    "daemon/base/b.c": '#include "proto/wire.h"\nvoid b_run(void)\n{\n    e.a_run(); /* a_run() */\n}',
    "cache/a.c": '#include "proto/attn_types.h"',
    "cache/b.c": "#include <stdio.h>",
    "kernels/b.c": '#include "proto/attn_time.h"',
    "kernels/gpu/a.cu": '#include "kernels/gpu/vendor/gpu.h"',
    "clients/a.c": '#include "proto/wire.h"',
    "clients/attnload_verify.c": '#include "kernels/reference.h"',
    "clients/one/a.c": "void same(void)\n{\n    one_b();\n}",
    "clients/one/b.c": "void one_b(void)\n{\n}",
    "clients/two/a.c": "void same(void)\n{\n}",
    "clients/two/b.c": "void two_b(void)\n{\n    same();\n}",
    "daemon/cards/x.c": '#include "daemon/cards/internal.h"\n#include "daemon/engine/core/state.h"',
    "daemon/cards/split/x.c": '#include "daemon/cards/internal.h"',
    "daemon/base/clock.c": "void clock_x(void)\n{\n    clock_gettime(1, 0);\n}",
    "daemon/transport/sp.c": "void sp_x(void)\n{\n    sp_peer_x();\n}",
    "daemon/transport/sp_peer.c": "void sp_peer_x(void)\n{\n    sp_x();\n}",
    "proto/two.h": "int two_a(void);\nint two_b(void);",
    "proto/two.c": '#include "proto/two.h"\nint two_a(void)\n{\n    return two_b();\n}',
    "proto/two_more.c": '#include "proto/two.h"\nint two_b(void)\n{\n    return 0;\n}',
}
PLANTED = {
    "cache/bad1.c": '#include "kernels/backend.h"',
    "kernels/bad2.h": '#include "cache/kv.h"',
    "kernels/gpu/bad3.cu": "  #  include <daemon/engine.h>",
    "proto/bad4.c": '#include "cache/kv.h"',
    "clients/bad5.c": '#include "daemon/log.h"',
    "clients/bad6.c": '#include "kernels/reference.h"',
    "daemon/base/bad7.c": '#include "clients/attn.h"',
    "cache/sub/bad8.c": '#include "../../proto/wire.h"',
    "kernels/bad9.c": '#include "attnd.pb-c.h"',
    "daemon/http/bad10.c": '#include "daemon/engine/core/state.h"',
    "daemon/process/bad11.c": '#include "daemon/cards/internal.h"',
    "daemon/base/bad12.c": "void bad12_run(void)\n{\n    bad12_other_run();\n}",
    "daemon/base/bad12_other.c":
        "int bad12_other_run(int a,\n                    int b)\n{\n    bad12_run();\n}",
    "daemon/base/bad13.c": "void x(void)\n{\n    t = time(NULL);\n}",
    "clients/bad14.c": "void x(void)\n{\n    clock_gettime(1, &t);\n}",
    "daemon/base/bad15.c":
        "void x(void)\n{\n    while (!atomic_compare_exchange_weak(&l, &n->next, n))\n}",
    "cache/bad16.h": '#include "cache/bad16_too.h"',
    "cache/bad16_too.h": '#include "cache/bad16.h"',
    "kernels/bad17.c": "void x(void)\n{\n    _mm_pause();\n}",
    "daemon/base/bad18.c": "void x(void)\n{\n    if (n > 0 && stats_get(batches) > 0)\n        f();\n}",
    # an include one way, a call the other
    "clients/one/bad19.c": "void bad19_run(void)\n{\n    bad19_more();\n}",
    "clients/one/bad19_too.c": '#include "bad19.h"\nvoid bad19_more(void)\n{\n}',
    "clients/one/bad19.h": "",
    "daemon/engine/core/bad20.c": "void core_x(void)\n{\n    bad20_top();\n}",
    "daemon/cards/bad20_too.c": "void bad20_top(void)\n{\n}",
    "daemon/http/bad21.h": '#include "daemon/transport/bad21_too.h"',
    "daemon/transport/bad21_too.h": "",
    "daemon/bad22/a.h": "",
    **{f"kernels/bad23/{i}.txt": "" for i in range(MAX_FILES + 1)},
}


def self_check():
    with tempfile.TemporaryDirectory() as root:
        for path, text in {**ALLOWED, **PLANTED}.items():
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                f.write("/* planted */\n" + text + "\n")
        found = breaches(root)
        n = 23
        for i in range(1, n + 1):
            if not any(re.search(rf"\bbad{i}\b", b) for b in found):
                sys.exit(f"planted breach {i} was not found in:\n" + "\n".join(found))
        if len(found) != n:
            sys.exit("more than was planted:\n" + "\n".join(found))
        print(f"all {n} planted breaches were found, nothing else")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--self-check"]:
        self_check()
        sys.exit()
    options = [a for a in sys.argv[1:] if a.startswith("--")]
    paths = [a for a in sys.argv[1:] if not a.startswith("--")]
    source = paths[0] if paths else os.path.join(os.path.dirname(__file__), "..")
    if not os.path.isdir(os.path.join(source, "proto")):
        sys.exit(f"{source} is not the source tree")
    if options == ["--arrows"]:
        print_arrows(source)
        sys.exit()
    found_here = breaches(source)
    if found_here:
        sys.exit("\n".join(found_here))
    print("every file keeps to its layer, and what there is one of is there once")
