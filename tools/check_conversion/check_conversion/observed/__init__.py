"""Runs inside the user's processes: keeps what is the user's, notes what is done, makes two runs comparable."""


def install():
    from check_conversion.observed import figures, interventions, order, process, steps
    process.install()
    steps.install()
    figures.install()
    if process.settings.intervene:
        order.install()
        interventions.install()  # last: the second run's weights move once they have been noted
    else:
        steps.keep_first_buckets()
