"""What the epsilon of single records means for a person with several of them."""

import dataclasses
import math
from collections.abc import Sequence

from dpfl_lightning.errors import UserError
from dpfl_lightning.privacy.accounting.accountant import Accountant
from dpfl_lightning.privacy.accounting.events import Event, NoisedEvent, Release, SelectionEvent
from dpfl_lightning.runtime.text import at_most

VACUOUS = 30.0  # an epsilon above it promises nothing


def of_group(event: Event, records: int) -> Event:
    """Return an event that costs one record at least as much as this one costs a group of so many records.

    A step without any record of the group, of probability `(1 - q)^k`, is the same for both neighbours; the others
    move a sum by at most k bounds. By joint convexity no mixture of such steps costs more than the largest move in all
    of them: the Gaussian event with rate `1 - (1 - q)^k` and noise / k. A selection has k times its range.
    """
    if isinstance(event, SelectionEvent):
        return dataclasses.replace(event, epsilon=records * event.epsilon)
    if isinstance(event, NoisedEvent) and event.noise_multiplier is not None:
        rate = -math.expm1(records * math.log1p(-event.sample_rate)) if event.sample_rate < 1 else 1.0
        return type(event).of(min(math.nextafter(rate, 2), 1.0), event.noise_multiplier / records, event.steps)
    return event


def group_words(events: Sequence[Event], delta: float, accountant: Accountant, most: int) -> str:
    """Return what holds for persons with 2, 4, ... records, up to the public maximum `most`."""
    released = [event for event in events if isinstance(event, Release)]
    sizes = [*(2**power for power in range(1, most.bit_length()) if 2**power < most), most]
    parts = []
    for records in sizes:
        try:
            epsilon, _ = (accountant.faster or accountant).bound([of_group(one, records) for one in released], delta)
        except UserError:
            epsilon = math.inf
        vacuous = epsilon > VACUOUS
        parts.append(f"{'vacuous' if vacuous else f'epsilon {at_most(epsilon)}'} for {records}")
        if vacuous:
            break
    more = " and more" if parts[-1].startswith("vacuous") and records < most else ""
    known = f"{', '.join(parts)}{more} records"
    return f"for all records of a person with several, at the same delta, holds: {known}"
