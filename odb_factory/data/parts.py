"""`Part`: samples of a micro-batch that go through the model by themselves, where memory does not hold all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from odb_factory.data.samples import MicroBatch, Sample
from odb_factory.planning import Budget

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """samples: what is collated, in the order of `whole.ids` from number `start` on; of an idle micro-batch the one it
    is run with.

        first, second = Part(micro_batch, loader.samples_of(micro_batch)).cut(loader.budget)
    """

    whole: MicroBatch
    samples: list[Sample]
    start: int = 0

    @property
    def is_whole(self) -> bool:
        return self.whole.idle or len(self.samples) == len(self.whole.ids)

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch as if it had these samples alone; what it says of all ranks stays."""
        if self.is_whole:
            return self.whole
        return self.whole.only(range(self.start, self.start + len(self.samples)))

    def take(self, of_whole: Sequence[T]) -> tuple[T, ...]:
        """What is said of each sample of the whole, of these."""
        return tuple(of_whole[self.start : self.start + len(self.samples)])

    def cut(self, budget: Budget) -> tuple[Part, Part]:
        """Two parts of which the larger is as small as can be: by tokens or patches as collated, whichever is more.

        There are two samples or more. budget: of the plan, which knows what the collator adds.
        """
        costs = [sample.cost for sample in self.samples]
        whole = budget.shape(costs)

        def larger(at: int) -> float:
            return max(_share(budget.shape(part), whole) for part in (costs[:at], costs[at:]))

        at = min(range(1, len(costs)), key=larger)
        return (
            Part(self.whole, self.samples[:at], self.start),
            Part(self.whole, self.samples[at:], self.start + at),
        )


def _share(part: tuple[int, int, int], whole: tuple[int, int, int]) -> float:
    """Of the tokens or of the patches of the whole, whichever is more. Shapes as `Budget.shape` returns them."""
    return max(part[0] * part[1] / (whole[0] * whole[1]), part[2] / max(whole[2], 1))
