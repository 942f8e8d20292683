#!/usr/bin/env python3
"""links.py: every link of a page leads somewhere, in the tree and where the pages are installed.

    tests/links.py BUILD_DIR | --self-check

A link to a file or folder must name one that is there, and one to a section (#heading) must name a
heading of that page. Nothing is installed: which file goes where is read from the script that CMake
has written for `cmake --install` (BUILD_DIR/docs/cmake_install.cmake), and links of installed pages
are looked up in that list. Links to other sites are not followed. --self-check plants dead links and
says whether they are found.
"""
import os
import re
import subprocess
import sys
import tempfile

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page):
    """The page without its code blocks and code spans, in which brackets are no links."""
    with open(page, encoding="utf-8") as f:
        text = re.sub(r"^```.*?^```", "", f.read(), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda m: "`" * len(m[0]), re.sub(r"^ {4}.*$", "", text, flags=re.M))


def headings(page):
    """The anchors that GitHub gives the page's headings."""
    with open(page, encoding="utf-8") as f:
        titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", f.read(), flags=re.M | re.S), flags=re.M)
    found = set()
    for title in titles:
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        n = 0
        while anchor + (f"-{n}" if n else "") in found:
            n += 1
        found.add(anchor + (f"-{n}" if n else ""))
    return found


def installed(script):
    """{installed path: its source} of the files that the script would install."""
    with open(script, encoding="utf-8") as f:
        commands = re.findall(r'file\(INSTALL DESTINATION "([^"]*)" TYPE (\w+)(.*?) FILES\b([^)]*)\)', f.read(), flags=re.S)
    files = {}
    for place, kind, options, what in commands:
        place = place.replace("${CMAKE_INSTALL_PREFIX}", "/usr")
        what, _, rules = what.partition("FILES_MATCHING")
        rules = [r.replace("\\\\", "\\") for r in re.findall(r'REGEX "([^"]*)"', rules)]
        name = re.search(r'RENAME "([^"]*)"', options)
        for source in re.findall(r'"([^"]*)"', what):
            if kind == "FILE":
                files[os.path.join(place, name[1] if name else os.path.basename(source))] = source
                continue
            for folder, _, names in os.walk(source):
                below = os.path.relpath(folder, source if source.endswith("/") else os.path.dirname(source))
                for n in names:
                    path = os.path.join(folder, n)
                    if not rules or any(re.search(r, path) for r in rules):
                        files[os.path.normpath(os.path.join(place, below, n))] = path
    return files


def dead(files):
    """What is wrong with the links of the pages among files, {path: source}."""
    folders = {os.path.dirname(path) for path in files}
    folders |= {"/".join(f.split("/")[:i]) for f in folders for i in range(1, f.count("/") + 1)}
    wrong, n_links = [], 0
    for page, source in sorted(files.items()):
        if not page.endswith(".md"):
            continue
        for link in LINK.findall(text_of(source)):
            if re.match(r"[a-z]+:", link):
                continue
            n_links += 1
            path, _, anchor = link.partition("#")
            target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
            if target not in files and target not in folders:
                wrong.append(f"{page}: {link} is not there")
            elif anchor and anchor not in headings(files[target]):
                wrong.append(f"{page}: {link}: no such heading")
    return wrong, n_links


def self_check():
    with tempfile.TemporaryDirectory() as folder:
        def write(name, text):
            os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
            with open(f"{folder}/{name}", "w", encoding="utf-8") as f:
                f.write(text)

        write("a.md", "# A\n[b](docs/b.md#b-c) [gone](docs/gone.md) [not installed](docs/c.txt) `[code](no.md)`\n"
                      "[folder](docs) [no heading](docs/b.md#d) [far](https://example.org/x.md)\n")
        write("docs/b.md", "## B, C\n[up](../a.md) [here](#b-c) [out](../../b.md)\n")
        write("docs/c.txt", "")
        write("script.cmake", f'file(INSTALL DESTINATION "${{CMAKE_INSTALL_PREFIX}}/doc" TYPE FILE FILES "{folder}/a.md")\n'
                              f'file(INSTALL DESTINATION "${{CMAKE_INSTALL_PREFIX}}/doc" TYPE DIRECTORY FILES "{folder}/docs" '
                              'FILES_MATCHING REGEX "/[^/]*\\\\.md$")\n')
        files = installed(f"{folder}/script.cmake")
        assert sorted(files) == ["/usr/doc/a.md", "/usr/doc/docs/b.md"], files
        wrong, _ = dead(files)
        assert wrong == ["/usr/doc/a.md: docs/gone.md is not there", "/usr/doc/a.md: docs/c.txt is not there",
                         "/usr/doc/a.md: docs/b.md#d: no such heading",
                         "/usr/doc/docs/b.md: ../../b.md is not there"], wrong
    print("planted links are found")


def main():
    if sys.argv[1:] == ["--self-check"]:
        return self_check()
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True)
    if listed.returncode == 0:
        tree = [name for name in listed.stdout.splitlines() if os.path.isfile(name)]
    else:  # the tree without its history
        tree = [os.path.normpath(os.path.join(folder, name)) for folder, _, names in os.walk(".") for name in names]
    rc = 0
    for what, files in (("in the tree", {name: name for name in tree}),
                        ("as installed", installed(os.path.join(sys.argv[1], "docs", "cmake_install.cmake")))):
        wrong, n_links = dead(files)
        n_pages = sum(name.endswith(".md") for name in files)
        print(f"{what}: {n_pages} pages, {n_links} links, {len(wrong)} dead")
        print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
        rc |= bool(wrong) or n_links < 30
    return rc


sys.exit(main())
