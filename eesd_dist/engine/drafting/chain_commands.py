"""The drafting of a round in one call, by all ranks of a draft stage at the same time.

Rank 0 sends the requests with their rules; every rank then makes the same call, and decides the
same: the ranks sum and choose inside of it. The results of the other ranks are dropped.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eesd_dist.backends.api import ChainDrafter, ChainStart, DraftedChain
from eesd_dist.backends.row_slices import RowSlice, joined
from eesd_dist.control.chain_rule import rule_of, tables_of
from eesd_dist.transport.command_stream import CommandSink
from eesd_dist.transport.commands import ChainRecord, DraftChains


class LeadingDrafter:
    """Rank 0 of several: sends the round to the other ranks, then computes its own part."""

    def __init__(self, own: ChainDrafter, commands: CommandSink) -> None:
        self._own = own
        self._commands = commands
        self.name = own.name
        self.has_masks = own.has_masks
        self.has_filters = own.has_filters

    @property
    def is_usable(self) -> bool:
        return self._own.is_usable

    def draft(self, chains: Sequence[ChainStart]) -> tuple[Tensor, list[DraftedChain]]:
        self._commands.announce(command_of(chains))
        return self._own.draft(chains)


# Shapes: L rows that the head has not read, D hidden channels.
def command_of(chains: Sequence[ChainStart]) -> DraftChains:
    """Returns the command for these requests, without filters: calls of several ranks have none."""
    tables = tables_of([chain.rule for chain in chains])
    lagging = [rows for chain in chains if chain.max_draft for rows in chain.lagging]
    records = [
        ChainRecord(
            tokens=chain.tokens,
            segment=chain.segment,
            max_draft=chain.max_draft,
            num_lagging=sum(rows.count for rows in chain.lagging) if chain.max_draft else 0,
            prices=prices,
            curve=curve,
            numbers=tuple(map(float, numbers)),
            temperature=chain.temperature,
            seed=chain.seed,
            mask=chain.mask,
        )
        for chain, numbers, (prices, curve) in zip(
            chains, tables.numbers, tables.places, strict=True
        )
    ]
    return DraftChains(
        chains=records,
        prices=tables.prices,
        curves=tables.curves,
        lagging_LD=joined(lagging) if lagging else None,
    )


def chains_of(command: DraftChains) -> list[ChainStart]:
    """Returns the requests of a command."""
    chains: list[ChainStart] = []
    # Copies: for a kernel an array that cannot be written has another type, compiled for again.
    prices, curves = ([table.copy() for table in t] for t in (command.prices, command.curves))
    rows_LD = torch.zeros(0, 0) if command.lagging_LD is None else command.lagging_LD
    end = 0
    for record in command.chains:
        first, end = end, end + record.num_lagging
        chains.append(
            ChainStart(
                tokens=record.tokens,
                segment=record.segment,
                max_draft=record.max_draft,
                rule=rule_of(record.numbers, prices[record.prices], curves[record.curve]),
                lagging=[RowSlice(rows_LD, first, end)] if end > first else (),
                temperature=record.temperature,
                seed=record.seed,
                mask=record.mask,
            )
        )
    return chains
