#!/usr/bin/env python3
"""A manual page made of what a program says of itself.

man.py NAME SECTION VERSION TEXT: TEXT is a file with the program's --help, or attnd.conf itself.
The page goes to stdout. Its date is that of the newest release in CHANGELOG.md. attnd's signals and
exit codes are the tables of docs/operations.md, its examples the first lines there.
"""

import pathlib
import re
import sys
import textwrap

TREE = pathlib.Path(__file__).resolve().parent.parent
ABOUT = {
    "attnd": "paged attention as a network service",
    "attnd.conf": "settings of attnd",
    "attnctl": "look at attnd and change it",
    "attnload": "load attnd with the attention of a language model",
    "attnbench": "time attention over a paged KV cache",
}
SEE_ALSO = {"attnctl": 1, "attnload": 1, "attnbench": 1, "attnd.conf": 5, "attnd": 8}


def quoted(text):
    """Text as roff prints it: no character of it is a command, hyphens can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("^", "\\(ha").replace("~", "\\(ti")
    text = text.replace("'", "\\(aq").replace("`", "\\(ga")
    return "\\&" + text if text.startswith((".", "\\(aq")) else text


def filled(lines):
    return [quoted(line) for line in textwrap.wrap(" ".join(map(str.strip, lines)), 66)]


def indent(line):
    return len(line) - len(line.lstrip())


def described(term, lines):
    """A term and what is said of it; what is set in columns keeps its lines."""
    out = [".TP", f"\\fB{quoted(term)}\\fR"]
    if any("   " in line.strip() for line in lines):
        depth = min(map(indent, lines))
        return out + [".nf"] + [quoted(line[depth:]) for line in lines] + [".fi"]
    return out + filled(lines)


def from_help(text):
    """The body of a page: words at the margin are headings (with a colon) or paragraphs, indented
    ones are terms, and what stands behind or below a term describes it."""
    out, synopsis, lines = [], [], text.splitlines()
    is_first_paragraph, i = True, 0
    while i < len(lines):
        line = lines[i]
        i += 1
        if not line.strip():
            continue
        if line.startswith("usage: "):
            synopsis.append(line.removeprefix("usage: "))
        elif not line.startswith(" "):
            heading = re.fullmatch(r"([^:.;]{1,40}):", line)
            if heading:
                out.append(f'.SS "{quoted(heading[1].capitalize())}"')
            elif not re.match(r"attn\w+(:| -) ", line):  # the name stands above
                paragraph = [line]
                while i < len(lines) and lines[i].strip() and not lines[i].startswith(" "):
                    paragraph.append(lines[i])
                    i += 1
                out += [".PP", *filled(paragraph)]
        else:
            depth, more = indent(line), []
            term, gap, rest = line.strip().partition("  ")
            at = line.index(rest.strip()) if rest.strip() else 0
            if rest.strip():
                more.append(" " * at + rest.strip())
            while i < len(lines) and lines[i].strip() and indent(lines[i]) > depth:
                more.append(lines[i])
                i += 1
            out += described(term, more)
    return synopsis, out


def from_settings(text):
    """The body of attnd.conf's: sections, and each setting with the comment above it."""
    out, comment = [], []
    for line in text.splitlines():
        setting = re.fullmatch(r"#(\w+ = .*)", line)
        section = re.fullmatch(r"\[(\w+)\]", line)
        if setting:
            out += described(setting[1], comment)
        elif section:
            out.append(f".SS [{section[1]}]")
        elif line.startswith("#"):
            comment.append(line[1:].strip())
            continue
        elif comment and not any(o.startswith(".SS") for o in out):  # the file's own
            for paragraph in "\n".join(comment).split("\n\n"):
                out += [".PP", *filled(paragraph.split("\n"))]
        comment = []
    return [], out


FILES = {
    "/etc/attnd/attnd.conf": "settings of /usr/bin/attnd, see attnd.conf(5); of PREFIX/bin/attnd "
    "it is PREFIX/etc/attnd/attnd.conf",
    "/run/attnd/attnd.sock": "where workers and attnctl find it, unless listen.address says "
    "otherwise; as a user other than root $XDG_RUNTIME_DIR/attnd.sock",
    "/run/attnd/attnd.sock.admin": "for operators (listen.admin): beside the first Unix socket, of "
    "mode 0600",
    "PREFIX/lib/attnd/attnd-cuda.so, attnd-hip.so": "the GPU backends; they are also looked for "
    "beside the program and in $ATTND_MODULE_DIR",
    "PREFIX/share/doc/attnd": "pages: docs/operations.md is about setting attnd up, docs/running.md about running it",
}


def plain(markdown):
    """A cell of a table without its marks."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown)
    return text.replace("`", "").replace("**", "").strip()


def table(page, head):
    """The rows of the table of this page whose first column has that head."""
    (rows,) = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    return [[plain(cell) for cell in row.strip("|").split(" | ", 1)] for row in rows.splitlines()]


def of_the_daemon():
    """Sections of attnd's page that its help does not have."""
    page = (TREE / "docs" / "operations.md").read_text()
    out = [".SH SIGNALS"]
    for signal, effect in table(page, "signal"):
        out += described(signal, [effect])
    out += [".SH EXIT STATUS", "As in sysexits.h."]
    for codes, meaning in table(page, "exit code"):
        meanings = meaning.split("; ")
        for code, one in zip(codes.split("; "), meanings, strict=True):
            out += described(code, [one])
    out.append(".SH FILES")
    for path, what in FILES.items():
        out += described(path, [what])
    (examples,) = re.findall(r"^## Start and stop\n\n((?:    .*\n)+)", page, re.M)
    out += [".SH EXAMPLES", ".nf"]
    out += [quoted(line[4:]) for line in examples.splitlines()]
    return out + [".fi"]


def main():
    name, section, version, file = sys.argv[1:]
    date = re.search(r"^## \[\d.*- (\d{4}-\d\d-\d\d)$", (TREE / "CHANGELOG.md").read_text(), re.M)[1]
    make = from_settings if name == "attnd.conf" else from_help
    synopsis, body = make(pathlib.Path(file).read_text())
    if name == "attnd.conf":
        synopsis = ["/etc/attnd/attnd.conf"]
    synopsis = synopsis or [f"{name} [OPTIONS]"]
    print(f'.TH {name.upper()} {section} "{date}" "attnd {version}"')
    print(f".SH NAME\n{quoted(name)} \\- {ABOUT[name]}\n.SH SYNOPSIS\n.nf")
    print(*(f"\\fB{quoted(s)}\\fR" for s in synopsis), ".fi", ".SH DESCRIPTION", sep="\n")
    print(*body[body[:1] == [".PP"] :], sep="\n")
    if name == "attnd":
        print(*of_the_daemon(), sep="\n")
    others = [f"\\fB{quoted(n)}\\fR({s})" for n, s in SEE_ALSO.items() if n != name]
    print(".SH SEE ALSO", ",\n".join(others), sep="\n")


main()
