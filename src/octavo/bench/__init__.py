"""Measurements on a Hopper GPU, in one command: what is timed, how, and what is written down."""

from octavo.bench.runner import PARTS, run
from octavo.bench.session import Session, hopper_session, rehearsal_session

__all__ = ["PARTS", "Session", "hopper_session", "rehearsal_session", "run"]
