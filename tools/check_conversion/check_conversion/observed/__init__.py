"""Runs inside the user's processes: protects their files, makes two runs comparable, notes what they do."""
from check_conversion.observed import (
    batchnorm,
    comparable,
    figures,
    generators,
    guard,
    notes,
    precision,
    sampling,
    saving,
    second_run,
    steps,
    untrained,
)
from check_conversion.protocol import Settings


def install():
    settings = Settings.given()
    for module in (notes, guard, comparable, batchnorm, precision, generators, sampling, steps,
                   untrained, saving, figures, second_run):
        module.install(settings)
