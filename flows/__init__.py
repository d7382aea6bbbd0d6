"""What happens, in order: each flow reads as a story. The command line on top of them is in `flows.cli`.

Prefect and MLflow read their settings when they are imported, so the defaults (no telemetry, databases under
`ALTO_HOME`) are put into the environment here, before any flow imports them.
"""

from alto_core.settings import load_settings, prepare_environment

prepare_environment(load_settings())
