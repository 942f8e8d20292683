"""transformers' OpenAI-compatible server, with the KV cache of its models in attnd.

    python3 -m attnd.hf.serve [--attnd URL] [--n-tokens N] [--share-prefixes] MODEL [OPTION...]

MODEL and further options are those of `transformers serve`; continuous batching is on. --attnd is where
attnd listens ($ATTND_ENDPOINT, else attnd's own default). Several such servers may run on one daemon, of
the same model or of others.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import attnd
import attnd.hf

from ._handed import refuse


def _manager_class(base: Any, url: str, options: dict[str, Any]) -> Any:
    workers = []  # to the end of the process

    class AttachedModels(base):  # type: ignore[misc]
        """Attaches what it loads."""

        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            model: Any = super()._load_model(*args, **kwargs)
            if not hasattr(model, "generate"):
                raise refuse(f"a server of {type(model).__name__}, which generates no text")
            workers.append(attnd.hf.attach(model.eval(), url, **options))
            return model

    return AttachedModels


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnd.hf.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--attnd", default=attnd.default_url(), help="where attnd listens")
    parser.add_argument("--n-tokens", type=int, default=0, help="as in attnd.hf.attach()")
    parser.add_argument("--share-prefixes", action="store_true", help="as in attnd.hf.attach()")
    parser.add_argument("model", metavar="MODEL", help="the one that is served")
    mine, others = parser.parse_known_args()

    try:
        from transformers.cli import transformers
        from transformers.cli.serving import model_manager
    except ImportError as e:
        parser.error(f"it needs transformers[serving], 5.23 or newer: {e}")

    cli: Any = transformers
    serving: Any = model_manager
    options = {"n_tokens": mine.n_tokens, "share_prefixes": mine.share_prefixes}
    serving.ModelManager = _manager_class(serving.ModelManager, mine.attnd, options)
    sys.argv = ["transformers", "serve", mine.model, "--continuous-batching", *others]
    cli.main()


if __name__ == "__main__":
    main()
