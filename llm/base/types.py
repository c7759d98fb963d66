"""Types that several packages share."""

from __future__ import annotations

import argparse
from typing import Any, TypeAlias

# A JSON object whose values can be of any JSON type, such as config.json.
JsonObject = dict[str, Any]
# What `ArgumentParser.add_subparsers` returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
