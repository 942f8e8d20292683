#!/usr/bin/env python3
"""Layout is clang-format's (.clang-format), and no line of C and no comment is over 100 columns.

    format.py               names what breaks that; exit 77 without clang-format 14
    format.py --fix         mends it: clang-format, and long comments go on in the next line
    format.py --self-check  finds and mends planted breaches, and nothing else
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

COLUMNS = 100
FOLDERS = ("cache", "clients", "daemon", "kernels", "proto", "scripts", "systemd", "tests")
C = (".c", ".h", ".cpp", ".cu", ".cuh")
HASH = (".cmake", ".txt", ".sh", ".py", ".conf", ".service", "")  # comments begin with #; "": scripts
VERSION = "14"  # others lay out differently; Debian 12 has this one


def files(root):
    yield "CMakeLists.txt"
    for folder in FOLDERS:
        for path, folders, names in os.walk(os.path.join(root, folder)):
            folders[:] = sorted(f for f in folders
                                if not f.startswith(("__", ".")) and f not in ("build", "corpus"))
            for name in sorted(names):
                yield os.path.relpath(os.path.join(path, name), root)


def clang_format():
    for name in ("clang-format-" + VERSION, "clang-format"):
        if shutil.which(name) is None:
            continue
        said = subprocess.run([name, "--version"], capture_output=True, text=True).stdout
        if re.search(r"version %s\." % VERSION, said):
            return name
    return None


def lay_out(root, tool, is_fix, is_loud=False):
    """True if all sources are as clang-format has them, or are now."""
    sources = [f for f in files(root) if f.endswith(C)]
    options = ["-i"] if is_fix else ["--dry-run", "-Werror"]
    done = subprocess.run([tool, "--style=file", *options, *sources], cwd=root,
                          capture_output=True, text=True)
    if is_loud:
        sys.stdout.write(done.stderr)
    return done.returncode == 0


# --- long lines -------------------------------------------------------------------------------


def has_long(path, line):
    """Every line of C and of the protocol counts, but a string's, which is kept whole; of other files
    the comments do: a pattern or a command is not always two lines."""
    if len(line) <= COLUMNS:
        return False
    extension = os.path.splitext(path)[1]
    if extension in C or extension == ".proto":
        return not line.lstrip().startswith('"')
    return extension in HASH and line.lstrip().startswith("#")


def opening(line):
    """What a comment's line begins with: its indent and mark; None for code."""
    found = re.match(r"\s*(/\*|\*(?!/)|//|#) *", line)
    return found[0] if found else None


def hanging(line, mark):
    """The column of the text behind a first word that stands apart, as in a table; 0: there is none."""
    found = re.match(r"\S+ {2,}(?=\S)", line[len(mark):])
    return len(mark) + len(found[0]) if found else 0


def goes_on(line, below, column):
    """True if the line below is of this one's paragraph, whose lines begin at that column."""
    mark, next_mark = opening(line).strip(), opening(below)
    if next_mark is None or len(next_mark) != column or hanging(below, next_mark):
        return False
    if next_mark.strip() != mark.replace("/*", "*"):
        return False
    text = below[column:]
    return text not in ("", "/") and not re.match(r"[-|]|\d+[.)]", text)


def above(line):
    """Code with a comment behind it: the comment in a line above it."""
    found = re.match(r"(\s*)(\S.*?)\s+(/\*.*\*/|//.*)$", line)
    return [found[1] + found[3], found[1] + found[2]] if found else None


def mend(lines):
    out, i = [], 0
    lines = list(lines)
    while i < len(lines):
        line = lines[i]
        i += 1
        if len(line) <= COLUMNS:
            out.append(line)
            continue
        mark = opening(line)
        ruler = re.match(r"(.*-{3,}?)-*( ?\*/)?$", line)
        if ruler:  # gets shorter
            n_over = len(line) - COLUMNS
            out.append(line[: len(line) - n_over - len(ruler[2] or "")] + (ruler[2] or ""))
            continue
        if mark is None:
            apart = None if line.endswith("\\") else above(line)
            if apart is None:
                out.append(line)
            else:
                lines[i:i] = apart
            continue
        cut = line.rfind(" ", len(mark) + 1, COLUMNS + 1)
        if line[cut:].strip() == "*/":  # not alone
            cut = line.rfind(" ", len(mark) + 1, cut)
        if cut < 0 or line.endswith("\\"):
            out.append(line)
            continue
        rest = line[cut:].strip()
        out.append(line[:cut].rstrip())
        column = hanging(line, mark) or len(mark)
        if i < len(lines) and "*/" not in line and goes_on(line, lines[i], column):
            lines[i] = lines[i][:column] + rest + " " + lines[i][column:]
        else:
            lines.insert(i, mark.replace("/*", " *").ljust(column) + rest)
    return out


def long_lines(root, is_fix):
    """Names the long lines that are left."""
    found = []
    for path in files(root):
        extension = os.path.splitext(path)[1]
        if extension not in C + HASH + (".proto",):
            continue
        with open(os.path.join(root, path), encoding="utf-8") as f:
            lines = f.read().split("\n")
        if is_fix and any(has_long(path, line) for line in lines):
            if extension in HASH:  # a line that is no comment stays
                lines = [x for part in comments_apart(lines) for x in part]
            else:
                lines = mend(lines)
            with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                f.write("\n".join(lines))
        for number, line in enumerate(lines, 1):
            if has_long(path, line):
                found.append("%s:%d: %d columns" % (path, number, len(line)))
    return found


def comments_apart(lines):
    """Runs of comment lines, mended, and what is between them."""
    run = []
    for line in lines:
        if line.lstrip().startswith("#"):
            run.append(line)
            continue
        yield mend(run)
        yield [line]
        run = []
    yield mend(run)


# --- the check of the check -------------------------------------------------------------------

WORDS = "some words that are read " * 5  # 125 columns
PLANTED = {
    "cache/good.c": "/* good.c: %s */\nint main(void)\n{\n    return 0;\n}\n" % WORDS[:80].strip(),
    "cache/layout.c": "int main(void) { return 0; }\n",
    "daemon/comment.c": "/* %s\n * which go on here. */\nint x;\n" % WORDS,
    "daemon/behind.c": "int x; /* %s */\n" % WORDS,
    "scripts/tool": "#!/bin/sh\n# %s\necho '%s'\n" % (WORDS, WORDS),
    "tests/corpus/fuzz_x/crash-1": b"\x80\xff# no text\n",
}


def self_check(tool):
    with tempfile.TemporaryDirectory() as root:
        shutil.copy(".clang-format", root)
        for path, text in {"CMakeLists.txt": "", **PLANTED}.items():
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(root, path), "wb") as f:
                f.write(text if isinstance(text, bytes) else text.encode())
        found = long_lines(root, False)
        assert [f.split(":")[0:2] for f in found] == [
            ["daemon/behind.c", "1"], ["daemon/comment.c", "1"], ["scripts/tool", "2"]], found
        assert not lay_out(root, tool, False), "layout.c"
        assert long_lines(root, True) == [], "not mended"
        assert lay_out(root, tool, True) and lay_out(root, tool, False)
        with open(os.path.join(root, "daemon/comment.c")) as f:
            text = f.read()
        assert re.sub(r"[\s*/]+", " ", text).strip() == WORDS + "which go on here. int x;", text
        assert text.count("\n") == 3, text  # the rest of the long line begins the next one
    print("planted breaches are found and mended, nothing else")


def main():
    option = sys.argv[1] if len(sys.argv) > 1 else ""
    if option not in ("", "--fix", "--self-check"):
        sys.exit("format.py: --fix, --self-check or nothing, not " + option)
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    tool = clang_format()
    if tool is None:
        print("skipped: no clang-format " + VERSION)
        sys.exit(77)
    if option == "--self-check":
        self_check(tool)
        return
    left = long_lines(".", option == "--fix")
    for line in left:
        print(line)
    if not lay_out(".", tool, option == "--fix", True) or left:
        sys.exit("tests/format.py --fix mends most of this")


if __name__ == "__main__":
    main()
