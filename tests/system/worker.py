"""A worker process that does as it is told: each line of its input is Python to run, each line of its output the JSON
of what that left in `result`, or the error it raised. `client`, `space`, a few
modules and what earlier lines named are at hand."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

from kvtier import wire
from kvtier_client import Client
from tests.system import pages


def main() -> None:
    where, options = sys.argv[1], json.loads(sys.argv[2])
    names: dict[str, Any] = {name: getattr(pages, name) for name in pages.__all__}
    names |= {"os": os, "statistics": statistics, "time": time, "wire": wire}
    bare = options.pop("bare", False)
    user = options.pop("user", 0)
    if user:  # only now, since another user may not be able to read what was imported
        os.setgroups([])
        os.setuid(user)
    client = names["client"] = Client(where, **options)
    if not bare:
        names["space"] = pages.open_space(client)
    print(json.dumps({"result": "ready"}), flush=True)
    for line in sys.stdin:
        names["result"] = None
        try:
            exec(json.loads(line), names)
            answer = {"result": names["result"]}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
