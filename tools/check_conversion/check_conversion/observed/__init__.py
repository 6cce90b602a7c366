"""Runs inside the user's processes: keeps their files, makes two runs comparable, notes what they do."""
from check_conversion.observed import (
    clocks,
    comparable,
    files,
    generators,
    guard,
    notes,
    sampling,
    steps,
)
from check_conversion.protocol import Settings


def install():
    settings = Settings.given()
    for module in (notes, guard, comparable, generators, sampling, steps, files, clocks):
        module.install(settings)
