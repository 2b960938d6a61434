"""Throughput over the time of a run, in bounded memory."""

_MAX_BINS = 512
_FIRST_BIN_S = 0.25
_TAIL = 0.1
"""Share of the rows that are the tail of a run."""


class Timeline:
    """Tokens and rows of a run in bins of time, which are merged in pairs when there are many."""

    def __init__(self) -> None:
        self.bin_s = _FIRST_BIN_S
        self.num_tokens: list[float] = []
        self.num_rows: list[int] = []
        self._end_s = 0.0
        """Time at which the last row ended: the last bin may have hardly begun."""

    def add(self, begin_s: float, end_s: float, *, num_tokens: int) -> None:
        """Adds a row that ended at `end_s`, and its tokens as if they had come evenly from
        `begin_s` on."""
        self._end_s = max(self._end_s, end_s)
        while end_s >= _MAX_BINS * self.bin_s:
            self._merge()
        last = int(end_s / self.bin_s)
        while len(self.num_rows) <= last:
            self.num_rows.append(0)
            self.num_tokens.append(0.0)
        self.num_rows[last] += 1
        first = min(int(begin_s / self.bin_s), last)
        duration_s = end_s - begin_s
        for number in range(first, last + 1):
            overlap_s = min(end_s, (number + 1) * self.bin_s) - max(begin_s, number * self.bin_s)
            share = overlap_s / duration_s if duration_s > 0 else 1.0 / (last + 1 - first)
            self.num_tokens[number] += share * num_tokens

    def first_token_s(self) -> float:
        """Returns when the first token came, within the width of a bin."""
        empty = next((at for at, tokens in enumerate(self.num_tokens) if tokens), 0)
        return empty * self.bin_s

    def tail_over_peak(self) -> float | None:
        """Returns the tokens/s in which the last tenth of the rows ended, over the highest mean of
        any tenth of the time; None before a tenth of the rows takes some bins."""
        num_left = _TAIL * sum(self.num_rows)
        first = len(self.num_rows)
        while first and num_left > 0:
            first -= 1
            num_left -= self.num_rows[first]
        start = int(self.first_token_s() / self.bin_s)
        width = max(1, round(_TAIL * (len(self.num_tokens) - start)))
        if not first or not any(self.num_tokens):
            return None
        peak = max(
            sum(self.num_tokens[at : at + width]) / width
            for at in range(len(self.num_tokens) - width + 1)
        )
        num_bins = self._end_s / self.bin_s - first
        return sum(self.num_tokens[first:]) / num_bins / peak if num_bins > 0 else None

    def rates(self) -> list[float]:
        """Returns the tokens/s of each bin."""
        return [tokens / self.bin_s for tokens in self.num_tokens]

    def _merge(self) -> None:
        self.bin_s *= 2
        tokens, rows = self.num_tokens, self.num_rows
        self.num_tokens = [sum(tokens[at : at + 2]) for at in range(0, len(tokens), 2)]
        self.num_rows = [sum(rows[at : at + 2]) for at in range(0, len(rows), 2)]
