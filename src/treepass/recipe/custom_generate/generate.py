"""The string form of ``custom_generate``: what ``model.generate`` loads from the folder ``treepass.RECIPE``.

    model.generate(**inputs, custom_generate=treepass.RECIPE, trust_remote_code=True, streamer=streamer)

transformers hands every argument to a function loaded from a folder, also those that it keeps from a callable.
"""

import copy
from typing import Any

from treepass import tree_decoding


def generate(
    model: Any,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: Any = None,
    drafter: Any = "auto",
    nodes: int = 32,
    seed: int | None = None,
    **arguments: Any,
) -> Any:
    """``model.generate`` with trees: all but ``drafter``, ``nodes`` and ``seed`` means what it means there."""
    config = copy.deepcopy(arguments.pop("generation_config", None) or model.generation_config)
    stop_strings, config.stop_strings = stop_strings or config.stop_strings, None
    method = tree_decoding(
        drafter, nodes=nodes, seed=seed, streamer=streamer, tokenizer=tokenizer, stop_strings=stop_strings
    )
    return model.generate(custom_generate=method, generation_config=config, **arguments)
