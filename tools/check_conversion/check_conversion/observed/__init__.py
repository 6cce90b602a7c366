"""Runs inside the user's processes: keeps their files, makes two runs comparable, notes what they do."""
from check_conversion.observed import (
    batchnorm,
    beside,
    clocks,
    comparable,
    files,
    generators,
    guard,
    notes,
    precision,
    sampling,
    steps,
)
from check_conversion.protocol import Settings


def install():
    settings = Settings.given()
    for module in (notes, guard, comparable, batchnorm, precision, generators, sampling, steps,
                   beside, files, clocks):
        module.install(settings)
