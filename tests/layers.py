#!/usr/bin/env python3
"""Holds the rules of docs/design.md, section 2: who may include whom, who may call whom in daemon/,
and of what there is one.

  tests/layers.py [SOURCE_DIR]   checks the tree; every breach is named, exit 1
  tests/layers.py --self-check   plants breaches in a scratch tree and expects each to be named

An include is judged by its first folder: "cache/kv.h" is cache's. Quoted includes without a folder
are the file's own folder's, angle brackets are the system's unless they name one of our folders.

A call is a name that one file of daemon/ defines and another uses. Files that call each other in a
circle belong to one of the groups below, each a thing of its own that is in several files for its
length.
"""
import os
import re
import sys
import tempfile

AREAS = ("cache", "kernels", "proto", "clients", "daemon", "tests")
CODE = (".c", ".h", ".cpp", ".cu", ".cuh", ".hip")
SHARED = ("proto/attn_types.h", "proto/attn_time.h")
# a connection's reading, writing and TLS, and the listener; clients in shared memory, and their
# listeners
GROUPS = (
    {"transport/sp_peer", "transport/sp_tls", "transport/sp_write", "transport/sp"},
    {"transport/shm_client", "transport/shm_region", "transport/gpu", "transport/shm"},
)
# what only these folders may include; a header whose name ends in internal.h is its own folder's
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


class Tree:
    def __init__(self, root):
        self.text = {}
        for area in AREAS[:5]:
            for folder, _, names in os.walk(os.path.join(root, area)):
                for name in names:
                    if name.endswith(CODE):
                        path = os.path.relpath(os.path.join(folder, name), root)
                        with open(os.path.join(root, path), encoding="utf-8") as f:
                            self.text[path] = without_comments(f.read())

    def includes(self, path):
        """(line, file as seen from the root)"""
        for i, line in enumerate(self.text[path].split("\n"), 1):
            m = re.match(r"\s*#\s*include\s*[\"<]([^\">]*)[\">]", line)
            if m is None:
                continue
            name = m.group(1)
            if name == "attnd.pb-c.h":
                name = "proto/attnd.pb-c.h"  # generated from proto/
            if ".." in name.split("/"):
                name = os.path.normpath(os.path.join(os.path.dirname(path), name))
            yield i, name


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


def folder_breaches(tree):
    for path in tree.text:
        for line, included in tree.includes(path):
            if "/" not in included or included.split("/")[0] not in AREAS:
                continue
            if not may_include(path, included):
                yield f"{path}:{line}: includes {included}"
            elif not may_look(path, included):
                yield f"{path}:{line}: looks into {included}"


def may_look(path, included):
    if included in INSIDES:
        inside = INSIDES[included]
    elif included.endswith("internal.h"):
        inside = (os.path.dirname(included),)
    else:
        return True
    return any((path + "/").startswith(folder + "/") for folder in inside)


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


def calls(tree):
    """Which file of daemon/ uses what another defines: {file: {file: a name}}."""
    defined, twice = {}, set()
    files = [p for p in tree.text if p.startswith("daemon/") and p.endswith(".c")]
    for path in files:
        for m in re.finditer(r"^(?!static|#|typedef|extern)[A-Za-z_][\w \*]*?\b(\w+)(?:\([^;{]*\)\s*\{"
                             r"|(?:\[[^\]]*\])* = )", tree.text[path], re.M):
            name = m.group(1)
            twice |= {name} if defined.get(name, path) != path else set()
            defined[name] = path
    arrows = {}
    for path in files:
        of = path[len("daemon/"):-2]
        arrows[of] = {}
        text = re.sub(r"\"(\\.|[^\"\\\n])*\"", '""', tree.text[path])
        for name in set(re.findall(r"(?<![.\w])(?<!->)(?<!struct )[A-Za-z_]\w*", text)) & set(defined) - twice:
            if defined[name] != path and not re.search(r"^static [^;={]*\b" + name + r"\(", text, re.M):
                arrows[of].setdefault(defined[name][len("daemon/"):-2], name)
    return arrows


def circle_breaches(tree):
    arrows = calls(tree)
    for circle in circles(arrows):
        if any(circle <= group for group in GROUPS):
            continue
        names = ", ".join(f"{a} -> {b} ({arrows[a][b]})" for a in sorted(circle)
                          for b in sorted(arrows[a]) if b in circle)
        yield f"daemon/: files call each other in a circle: {names}"
    arrows = {p: {i for _, i in tree.includes(p)} for p in tree.text}
    for circle in circles(arrows):
        yield "headers include each other in a circle: " + ", ".join(sorted(circle))


def once_breaches(tree):
    for pattern, what, folders, home in ONCE:
        for path, text in tree.text.items():
            if not path.startswith(folders) or path in home:
                continue
            for m in re.finditer(pattern, text):
                yield f"{path}:{text.count(chr(10), 0, m.start()) + 1}: {what}"


def breaches(root):
    tree = Tree(root)
    return [*folder_breaches(tree), *circle_breaches(tree), *once_breaches(tree)]


ALLOWED = {
    "daemon/a.c": '#include "cache/kv.h"\nvoid a_run(void)\n{\n    b_run();\n}',
    "daemon/b.c": '#include "proto/wire.h"\nvoid b_run(void)\n{\n    e.a_run(); /* a_run() */\n}',
    "cache/a.c": '#include "proto/attn_types.h"',
    "cache/b.c": "#include <stdio.h>",
    "kernels/b.c": '#include "proto/attn_time.h"',
    "kernels/gpu/a.cu": '#include "kernels/gpu/vendor/gpu.h"',
    "clients/a.c": '#include "proto/wire.h"',
    "clients/attnload_verify.c": '#include "kernels/reference.h"',
    "daemon/cards/x.c": '#include "daemon/cards/internal.h"',
    "daemon/base/clock.c": "void clock_x(void)\n{\n    clock_gettime(1, 0);\n}",
}
PLANTED = {
    "cache/bad1.c": '#include "kernels/backend.h"',
    "kernels/bad2.h": '#include "cache/kv.h"',
    "kernels/gpu/bad3.cu": "  #  include <daemon/engine.h>",
    "proto/bad4.c": '#include "cache/kv.h"',
    "clients/bad5.c": '#include "daemon/log.h"',
    "clients/bad6.c": '#include "kernels/reference.h"',
    "daemon/bad7.c": '#include "clients/attn.h"',
    "cache/sub/bad8.c": '#include "../../proto/wire.h"',
    "kernels/bad9.c": '#include "attnd.pb-c.h"',
    "daemon/bad10.c": '#include "daemon/engine/core/state.h"',
    "daemon/bad11.c": '#include "daemon/cards/internal.h"',
    "daemon/bad12.c": "void bad12_run(void)\n{\n    bad12_other_run();\n}",
    "daemon/bad12_other.c": "int bad12_other_run(int a,\n                    int b)\n{\n    bad12_run();\n}",
    "daemon/bad13.c": "void x(void)\n{\n    t = time(NULL);\n}",
    "clients/bad14.c": "void x(void)\n{\n    clock_gettime(1, &t);\n}",
    "daemon/bad15.c": "void x(void)\n{\n    while (!atomic_compare_exchange_weak(&l, &n->next, n))\n}",
    "cache/bad16.h": '#include "cache/bad16_too.h"',
    "cache/bad16_too.h": '#include "cache/bad16.h"',
    "kernels/bad17.c": "void x(void)\n{\n    _mm_pause();\n}",
    "daemon/bad18.c": "void x(void)\n{\n    if (n > 0 && stats_get(batches) > 0)\n        f();\n}",
}


def self_check():
    with tempfile.TemporaryDirectory() as root:
        for path, text in {**ALLOWED, **PLANTED}.items():
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                f.write("/* planted */\n" + text + "\n")
        found = breaches(root)
        n = 18
        for i in range(1, n + 1):
            if not any(re.search(rf"\bbad{i}\b", b) for b in found):
                sys.exit(f"planted breach {i} was not found in:\n" + "\n".join(found))
        if len(found) != n:
            sys.exit("more than was planted:\n" + "\n".join(found))
        print(f"all {n} planted breaches were found, nothing else")


if sys.argv[1:2] == ["--self-check"]:
    self_check()
    sys.exit()
root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..")
if not os.path.isdir(os.path.join(root, "proto")):
    sys.exit(f"{root} is not the source tree")
found = breaches(root)
if found:
    sys.exit("\n".join(found))
print("every include and call keeps to its layer, and what there is one of is there once")
