"""Ranks that translate for the first one, which alone reads, writes and warns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from mtrain.decode.beam import Hypothesis
from mtrain.decode.translator import EncodedSource, Translator
from mtrain.run.run_dir import RunDir

Tree = dict[str, Any]
Load = Callable[[RunDir], AbstractContextManager[Translator]]  # lends the translator of a run


class DistributedTranslator(Translator):
    """The first rank's translator: what it is asked for, it asks of the others too."""

    def __init__(self, own: Translator) -> None:
        models = own.ensemble.models
        super().__init__(
            models,
            own.tokenizer,
            own.decoding,
            own.device,
            own.wanted,
            own.readers,
            own.process_group,
        )

    def search(
        self, sources: Sequence[EncodedSource], with_scores: bool = True
    ) -> list[list[Hypothesis]]:
        """Return the best targets of each source, as all ranks find them."""
        self._ask("search" if with_scores else "search without scores", sources, [])
        return super().search(sources, with_scores)

    def score(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[list[float]]:
        """Return the log-probability of each piece of a given target, and of its eos."""
        self._ask("score", sources, targets)
        return super().score(sources, targets)

    def attend(
        self, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> list[Tensor]:
        """Return what each piece of a given target, and its eos, gives to each source piece."""
        self._ask("attend", sources, targets)
        return super().attend(sources, targets)

    def _ask(
        self, what: str, sources: Sequence[EncodedSource], targets: Sequence[list[int]]
    ) -> None:
        tree: Tree = {"what": what, "targets": list(targets)}
        tree["sources"] = [[own.ids, own.prefix, own.seed, own.text] for own in sources]
        self.process_group.broadcast_bytes(json.dumps(tree).encode())


@contextmanager
def leading(own: Translator) -> Iterator[Translator]:
    """Give the translator of the first rank, and let the others go in the end."""
    if own.process_group.size == 1:
        yield own
        return
    yield DistributedTranslator(own)
    own.process_group.broadcast_bytes(b"")


def follow(own: Translator) -> None:
    """Do what the first rank asks for, until it has no more questions."""
    answer_of: dict[str, Callable[[list[EncodedSource], list[list[int]]], object]] = {
        "search": lambda sources, _: own.search(sources),
        "search without scores": lambda sources, _: own.search(sources, with_scores=False),
        "score": own.score,
        "attend": own.attend,
    }
    while message := own.process_group.broadcast_bytes(b""):
        tree: Tree = json.loads(message)
        sources = [
            EncodedSource(ids, tuple(prefix), *rest) for ids, prefix, *rest in tree["sources"]
        ]
        answer_of[tree["what"]](sources, tree["targets"])
