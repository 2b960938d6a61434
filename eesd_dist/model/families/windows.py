"""Reads from config.json which layers attend within a sliding window."""

from collections.abc import Callable

from eesd_dist.model.config_fields import ConfigFields

Windows = Callable[[ConfigFields, int], tuple[int | None, ...]]
"""Config and number of layers -> window of each layer; None: all positions."""


def no_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    return _by_type(fields, None, num_layers) or (None,) * num_layers


def window_in_every_layer(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Gives every layer the window, unless `layer_types` is present."""
    window = None if fields.says_null("sliding_window") else fields.integer("sliding_window")
    return _by_type(fields, window, num_layers) or (window,) * num_layers


def window_in_every_layer_if_set(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Gives every layer the window, unless `layer_types` is present; without a window, none."""
    if fields.get("sliding_window") is None:
        return no_windows(fields, num_layers)
    return window_in_every_layer(fields, num_layers)


def window_in_upper_layers(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Gives layers from `max_window_layers` on the window, if `use_sliding_window` is true and
    `layer_types` is absent."""
    is_off = fields.says_null("sliding_window") or not fields.flag("use_sliding_window")
    window = None if is_off else fields.integer("sliding_window")
    max_window_layers = fields.optional_integer("max_window_layers")
    first = 28 if max_window_layers is None else max_window_layers
    return _by_type(fields, window, num_layers) or tuple(
        window if layer >= first else None for layer in range(num_layers)
    )


def window_in_every_other_layer(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Gives the first, third and every second layer the window, unless `layer_types` is present."""
    window = None if fields.says_null("sliding_window") else fields.integer("sliding_window")
    by_type = _by_type(fields, window, num_layers)
    if by_type is None and window is None:
        raise fields.error("sliding_window", expected="a window, or layer_types that need none")
    return by_type or tuple(None if layer % 2 else window for layer in range(num_layers))


def window_in_all_but_every_nth_layer(
    fields: ConfigFields, num_layers: int
) -> tuple[int | None, ...]:
    """Gives every `sliding_window_pattern`-th layer no window and the others one, unless
    `layer_types` is present."""
    window = None if fields.says_null("sliding_window") else fields.integer("sliding_window")
    by_type = _by_type(fields, window, num_layers)
    if by_type is None and window is None:
        raise fields.error("sliding_window", expected="a window, or layer_types that need none")
    pattern = fields.integer("sliding_window_pattern")
    return by_type or tuple(
        None if layer % pattern == 0 else window for layer in range(1, num_layers + 1)
    )


def _by_type(
    fields: ConfigFields, window: int | None, num_layers: int
) -> tuple[int | None, ...] | None:
    """Returns the windows by `layer_types`, where `attention` is an older name for full attention;
    None if absent."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return None
    window_of = {"full_attention": None, "attention": None, "sliding_attention": window}
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or not all(isinstance(kind, str) and kind in window_of for kind in layer_types)
    ):
        raise fields.error(
            "layer_types", expected=f"{num_layers} of full_attention, sliding_attention"
        )
    if window is None and "sliding_attention" in layer_types:
        raise fields.error("layer_types", expected="full_attention only: no window is configured")
    return tuple(window_of[str(kind)] for kind in layer_types)
