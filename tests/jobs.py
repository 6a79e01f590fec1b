"""Jobs that differ from another one in a few keys or prices."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from recycle.job import Job, PricedJob

J = TypeVar("J", bound=Job)


def varied(config: J, **sections: Mapping[str, Any]) -> J:
    """The job with other values of some keys, by section; a priced one with their prices."""
    changed = {name: msgspec.structs.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    if isinstance(config, PricedJob):
        return config.with_sections(**changed)
    return msgspec.structs.replace(config, **changed)


def repriced(config: PricedJob, **prices) -> PricedJob:
    """The job with other values of some prices."""
    return msgspec.structs.replace(config, prices=replace(config.prices, **prices))
