"""Runs vLLM once, with its own attention or with attnd's, and writes what came of it.

    run.py FILE     {"out": file, "model": path, "is_own": bool, "fails": bool, "options": of vllm.LLM,
                     "rounds": [{"prompts": [ids], "n": [tokens], "logprobs": n, "kills": n,
                                 "abort": n, "replaces": n, "names": [text], "says": file,
                                 "asks": of vllm.SamplingParams}]}

A round gives its texts; kills: the daemon, as often, while texts are made ($ENGINES_KEEPER is the
keeper's pid); replaces: as often it is ended and another one begins empty ($ENGINES_REPLACE is a file
that asks for it); abort: the first n requests are aborted in the middle; names: the requests'
attnd_request; says: each step's texts so far are written there, a line each; fails: rows fail now and then. At the end the
engine must hold no sequence.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import time


def of_keeper():
    keeper = os.environ["ENGINES_KEEPER"]
    return int(pathlib.Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])


class Disturbed:
    """Has something done to the daemon after some steps of the engine."""

    def __init__(self, round):
        self.n_steps, self.n_kills = 0, round.get("kills", 0)
        self.n_replaces = round.get("replaces", 0)

    def step(self):
        self.n_steps += 1
        if self.n_kills > 0 and self.n_steps % 15 == 0:
            self.n_kills -= 1
            os.kill(of_keeper(), signal.SIGKILL)
        if self.n_replaces > 0 and self.n_steps % 8 == 7:
            self.n_replaces -= 1
            ask = pathlib.Path(os.environ["ENGINES_REPLACE"])
            ask.write_text("")
            while ask.exists():
                time.sleep(0.01)


def run_round(llm, number, round, params):
    engine, done, disturbed = llm.llm_engine, {}, Disturbed(round)
    names = [f"r{number}.{i}" for i in range(len(round["prompts"]))]
    attnd_names = round.get("names", [None] * len(names))
    for name, ids, n, attnd_name in zip(names, round["prompts"], round["n"], attnd_names):
        how = params(n, round.get("logprobs"), attnd_name, round.get("asks", {}))
        engine.add_request(name, {"prompt_token_ids": ids}, how)
    n_abort = round.get("abort", 0)
    says = open(round.get("says", os.devnull), "w")
    while engine.has_unfinished_requests():
        outs = engine.step()
        texts = {o.request_id.split(".")[1]: list(o.outputs[0].token_ids) for o in outs}
        print(json.dumps(texts), file=says, flush=True)
        for o in outs:
            if o.finished:
                done[o.request_id.split("-")[0] if o.request_id not in names else o.request_id] = o
        disturbed.step()
        if n_abort > 0 and disturbed.n_steps == 12:
            engine.abort_request(names[:n_abort])
    if is_one_process():
        engine.step()  # with it, vLLM says what has ended
    found = []
    for i, name in enumerate(names):
        o = done.get(name)
        if i < n_abort and (o is None or o.outputs[0].finish_reason == "abort"):
            found.append(None)
            continue
        c = o.outputs[0]
        logprobs = None
        if c.logprobs:
            logprobs = [{str(t): p.logprob for t, p in at.items()} for at in c.logprobs]
        found.append({"ids": list(c.token_ids), "cached": o.num_cached_tokens, "logprobs": logprobs})
        if "asks" in round:
            found[-1]["all"] = [list(c.token_ids) for c in o.outputs]
            found[-1]["prompt"] = [
                at and next(iter(at.values())).logprob for at in o.prompt_logprobs or ()
            ]
    return found


def is_one_process():
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"


def fail_some():
    """Every twelfth step has no blocks for half of its rows. Gives how many rows failed, of each."""
    from attnd_vllm.worker import shared

    requests, counts = shared.requests, []
    ready = requests._ready

    def _ready(rows):
        kept = ready(rows)
        short = [r for r in kept if r.may_fail][::2] if len(counts) % 12 == 11 else []
        for r in short:
            requests.fail(r)
        counts.append(len(short))
        return [r for r in kept if r not in short]

    requests._ready = _ready
    return counts


def main():
    asked = json.loads(pathlib.Path(sys.argv[1]).read_text())
    if asked["is_own"]:
        os.environ.pop("ATTND_VLLM", None)
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def params(n, logprobs, name, asks):
        extra = {"kv_transfer_params": {"attnd_request": name}} if name else None
        how = {"temperature": 0.0, "ignore_eos": True, "logprobs": logprobs, "extra_args": extra}
        if asks:  # all texts of a prompt in one answer
            how["output_kind"] = RequestOutputKind.FINAL_ONLY
        return SamplingParams(max_tokens=n, **{**how, **asks})

    llm = LLM(model=asked["model"], skip_tokenizer_init=True, seed=0, disable_log_stats=True, **asked["options"])
    if "ENGINES_READY" in os.environ:  # two engines begin together
        pathlib.Path(os.environ["ENGINES_READY"]).write_text("")
        while not pathlib.Path(os.environ["ENGINES_GO"]).exists():
            time.sleep(0.05)
    n_failed = fail_some() if asked.get("fails") else []
    rounds = [run_round(llm, i, r, params) for i, r in enumerate(asked["rounds"])]
    result = {"rounds": rounds}
    if not asked["is_own"] and is_one_process():
        from attnd_vllm.worker import shared

        result["held"] = len(shared.requests.held)
        result["failed"] = sum(n_failed)
        result["restarts"] = shared.requests.n_restarts
        result["reserved"] = shared.requests.pool.probe().n_reserved_blocks
    pathlib.Path(asked["out"]).write_text(json.dumps(result))
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
