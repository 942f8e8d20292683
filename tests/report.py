#!/usr/bin/env python3
"""Says what ctest does in a line per test, then what the failed ones printed.

    ctest --output-junit XML ... | report.py NAME XML SUMMARY

A line is printed as its test ends; the truth is XML, which ctest writes when all have. SUMMARY gets
`N passed, N failed, N skipped` and a line for every skipped test, with the reason that it printed.
"""
import re
import sys
import xml.etree.ElementTree as ElementTree

# "12/90 Test #3: name .....   Passed    1.09 sec"; what failed has more words before the seconds
ENDED = re.compile(r"^ *\d+/\d+ +Test +#\d+: (\S+) \.*\s*(.*?) +([\d.]+) sec")


def result_of(words):
    if words.startswith("Passed"):
        return "ok"
    return "skipped" if re.match(r"\**(Skipped|Not Run \(Disabled\))", words) else "FAILED"


def result_in(case):
    """A <testcase> of ctest's: a skipped test is `notrun`, as is one whose program is missing."""
    if case.get("status") == "run":
        return "ok"
    skipped = case.find("skipped")
    reason = "" if skipped is None else skipped.get("message", "")
    is_skipped = case.get("status") == "disabled" or reason.startswith("SKIP_")
    return "skipped" if is_skipped else "FAILED"


def message_of(case):
    failure = case.find("failure")
    return "" if failure is None else failure.get("message", "")


def output_of(case):
    out = case.find("system-out")
    return "" if out is None or out.text is None else out.text.strip("\n")


def reason_of(case):
    """The last line that speaks of skipping, or the last one there is."""
    lines = [line.strip() for line in output_of(case).splitlines() if line.strip()]
    if case.get("status") == "disabled":
        return "disabled"
    # pytest ends with a count, which says less than the lines before it
    spoken = [line for line in lines if re.search(r"(?<!\d )skip", line, re.I)]
    return (spoken or lines or ["it does not say why"])[-1]


def say(result, name, seconds):
    print("%-8s %-60s %7.1f s" % (result, name, float(seconds)), flush=True)


def main():
    build, xml, summary = sys.argv[1:]
    said, rest = {}, []
    for line in sys.stdin:
        ended = ENDED.match(line)
        if ended:
            said[ended[1]] = ended[2].strip("*")
            say(result_of(ended[2]), build + "/" + ended[1], ended[3])
        else:
            rest.append(line)
    try:
        cases = list(ElementTree.parse(xml).iter("testcase"))
    except (OSError, ElementTree.ParseError) as e:
        cases = []
        rest.append("%s: %s\n" % (xml, e))
    counts = {"ok": 0, "FAILED": 0, "skipped": 0}
    reasons = []
    for case in cases:
        name, result = build + "/" + case.get("name"), result_in(case)
        counts[result] += 1
        if case.get("name") not in said:
            say(result, name, case.get("time", 0))
        if result == "skipped":
            reasons.append("%s: %s" % (name, reason_of(case)))
        if result == "FAILED":
            why = "%s %s" % (said.get(case.get("name"), ""), message_of(case))
            print("-- %s: %s; it printed:" % (name, why.strip()))
            print("%s\n-- end of %s" % (output_of(case), name), flush=True)
    if not cases:  # ctest itself failed
        counts["FAILED"] = 1
        say("FAILED", build + ": ctest", 0)
        sys.stdout.writelines(rest)
    with open(summary, "w") as f:
        print("%(ok)d passed, %(FAILED)d failed, %(skipped)d skipped" % counts, file=f)
        f.writelines(reason + "\n" for reason in reasons)


if __name__ == "__main__":
    main()
