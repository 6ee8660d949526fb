"""The old name of `python -m benchmarks.timeline picture`, for one release."""

from ..clone import run_by_old_name

if __name__ == "__main__":
    run_by_old_name("onepass.bench.timeline.picture", "benchmarks.timeline", "picture")
