"""Names that changed. A run's config.json may have the old ones; elsewhere an error tells the new one."""

from __future__ import annotations

from typing import Any

FIELDS = {"context.deal": "context.sequence_sharding"}
VALUES = {
    "context.exchange": {"gather": "all_gather", "heads": "all_to_all"},
    "context.sequence_sharding": {"in_order": "contiguous", "by_cost": "balanced"},
}


def new_value(value: str) -> str | None:
    """The new name of a value of some field; None: the value has always had its name."""
    return next((values[value] for values in VALUES.values() if value in values), None)


def with_new_names(config: Any) -> Any:
    """A config of an earlier version, as JSON has it, in the names of this one.

    >>> with_new_names({"context": {"exchange": "heads", "deal": None}})
    {'context': {'exchange': 'all_to_all', 'sequence_sharding': None}}
    """
    if not isinstance(config, dict):
        return config
    renamed = {}
    for section, fields in config.items():
        if isinstance(fields, dict):
            fields = {FIELDS.get(f"{section}.{name}", f".{name}").rpartition(".")[2]: x for name, x in fields.items()}
            for name, value in fields.items():
                new_values = VALUES.get(f"{section}.{name}", {})
                if isinstance(value, str) and value in new_values:
                    fields[name] = new_values[value]
        renamed[section] = fields
    return renamed
