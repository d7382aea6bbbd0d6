"""Adapters as versions of registered models, and the aliases `champion` and `challenger` on them.

A version holds the adapter and what loads it; the base model stays a reference (see `packaging`). Which adapter
deserves an alias is decided elsewhere (`alto_core.promotion`): here an alias moves whole or not at all, and only while
the registry still looks as it did when the decision was made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.file_utils import local_file_uri_to_path

from alto_core.config import NAME_PATTERN
from alto_core.errors import TrackingError
from alto_core.ownership import Person
from alto_core.tracking.adapters import adapter_digest, adapter_files
from alto_core.tracking.connection import Connection, timed
from alto_core.tracking.description import as_tags
from alto_core.tracking.model_versions import create_version, remove_leftovers
from alto_core.tracking.packaging import ServingFacts

CHAMPION = "champion"
CHALLENGER = "challenger"
DIGEST_TAG = "alto.adapter_sha256"
PREVIOUS_TAG = "alto.previous_champion"
DECISION_TAG = "alto.promotion"
_NOT_FOUND_CODES = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""For an unknown model, and for an unknown alias of a known one."""


@dataclass(frozen=True, kw_only=True)
class RegisteredAdapter:
    """One version of a registered model."""

    name: str
    version: int
    aliases: tuple[str, ...]
    run_id: str
    """MLflow run of the job that trained it."""
    tags: Mapping[str, str]

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"


class Registry:
    """The registered models of one MLflow."""

    def __init__(self, connection: Connection):
        self._connection = connection

    @property
    def person(self) -> Person:
        """Who is logged in to MLflow."""
        return self._connection.person

    @timed
    def register(
        self,
        *,
        name: str,
        experiment_id: str,
        run_id: str,
        folder: Path,
        tags: Mapping[str, str],
        facts: ServingFacts,
    ) -> RegisteredAdapter:
        """Make a model version of an adapter: the model's first version becomes champion, a later one challenger.

        Called again with the same run and the same weights, returns the version that is there.

        Args:
            name: registered model; created where there is none.
            experiment_id: experiment of the task.
            run_id: run of the job that trained the adapter.
            folder: the exported PEFT adapter.
            tags: what links the version to its task, job, data digest and scores.
            facts: what answering with it takes.

        Raises:
            TrackingError: the name or the folder is unfit, or MLflow did not take it.
        """
        _check_name(name)
        all_tags = {**tags, DIGEST_TAG: adapter_digest(adapter_files(folder))}
        with self._connection.exclusive():
            versions = self._versions(name)
            if not any(v.run_id == run_id for v in versions):
                remove_leftovers(self._connection, name=name, experiment_id=experiment_id, run_id=run_id)
            same = [v for v in versions if v.run_id == run_id and v.tags.get(DIGEST_TAG) == all_tags[DIGEST_TAG]]
            number = int(
                same[0].version
                if same
                else create_version(
                    self._connection,
                    name=name,
                    experiment_id=experiment_id,
                    run_id=run_id,
                    folder=folder,
                    tags=all_tags,
                    facts=facts,
                ).version
            )
            registered = self.version(name, number)
            if not registered.aliases and DECISION_TAG not in registered.tags:
                is_first = all(int(v.version) >= number for v in versions)
                self._set_alias(name, CHAMPION if is_first else CHALLENGER, number)
                registered = self.version(name, number)
        if not registered.aliases and DECISION_TAG not in registered.tags:
            raise TrackingError(f"version {number} of {name}: got no alias back, expected one. Register it again.")
        return registered

    @timed
    def find(self, name: str, alias: str) -> RegisteredAdapter:
        """The version that an alias stands on.

        Raises:
            TrackingError: there is no such model or alias, or the alias is a reserved word.
        """
        check_alias(alias)
        found = self.find_if_any(name, alias)
        if found is None:
            known = ", ".join(sorted({a for v in self._versions(name) for a in self.version(name, v.version).aliases}))
            cure = ". The next winner that `alto tune` registers under this name is one" if alias == CHALLENGER else ""
            raise TrackingError(
                f"registered model {name!r}: got no version with alias {alias!r}, expected one of its aliases: "
                f"{known or 'it has none'}{cure}"
            )
        return found

    @timed
    def find_if_any(self, name: str, alias: str) -> RegisteredAdapter | None:
        """The version that an alias stands on; None when there is none.

        Raises:
            TrackingError: MLflow cannot be reached.
        """
        _check_name(name)
        client = self._connection.client
        try:
            return _registered(client.get_model_version_by_alias(name, alias))
        except MlflowException as error:
            if error.error_code in _NOT_FOUND_CODES:
                return None
        return _registered(
            self._connection.call("find a model version", client.get_model_version_by_alias, name, alias)
        )

    @timed
    def version(self, name: str, number: int) -> RegisteredAdapter:
        """A version by its number.

        Raises:
            TrackingError: there is none.
        """
        _check_name(name)
        # a search leaves aliases out, so the version itself is asked
        call, client = self._connection.call, self._connection.client
        return _registered(call(f"find version {number} of {name}", client.get_model_version, name, str(number)))

    @timed
    def download(self, adapter: RegisteredAdapter, folder: Path) -> Path:
        """Fetch a version's files into a folder.

        Returns:
            Where they are; a PEFT adapter folder with a few more files.

        Raises:
            TrackingError: MLflow did not give them, or they are no adapter.
        """
        call, client = self._connection.call, self._connection.client
        uri = call("find a model's files", client.get_model_version_download_uri, adapter.name, str(adapter.version))
        if uri.startswith(("file:", "/")):  # MLflow copies what a link points to, and the copy shows it no more
            adapter_files(Path(local_file_uri_to_path(uri)))
        folder.mkdir(parents=True, exist_ok=True)
        local = call(
            f"download {adapter.uri}",
            download_artifacts,
            artifact_uri=uri,
            dst_path=str(folder),
            tracking_uri=self._connection.uri,
        )
        adapter_files(Path(local))
        return Path(local)

    @timed
    def make_champion(
        self,
        adapter: RegisteredAdapter,
        *,
        instead_of: RegisteredAdapter | None,
        decision: str,
        previous: RegisteredAdapter | None = None,
    ) -> None:
        """Move the alias `champion`, in one step, if the registry still looks as it did.

        Args:
            adapter: the version to put it on.
            instead_of: the champion that it was compared with; None: there was none.
            decision: JSON text, kept as a tag of the version and as an artifact of its run.
            previous: noted as the version to go back to.

        Raises:
            TrackingError: an alias has moved meanwhile, or MLflow refused. The old champion stays.
        """
        with self._connection.exclusive():
            self._check_unchanged(adapter, instead_of)
            if previous is not None:
                self._set_tag(adapter, PREVIOUS_TAG, str(previous.version))
            self._keep_decision(adapter, decision)
            self._set_alias(adapter.name, CHAMPION, adapter.version)
            if CHALLENGER in adapter.aliases:
                self._connection.call(
                    "take an alias off",
                    self._connection.client.delete_registered_model_alias,
                    adapter.name,
                    CHALLENGER,
                )

    @timed
    def keep_decision(self, adapter: RegisteredAdapter, decision: str) -> None:
        """Note a decision that moves no alias: a tag of the version and an artifact of its run.

        Raises:
            TrackingError: MLflow refused.
        """
        self._keep_decision(adapter, decision)

    def _check_unchanged(self, adapter: RegisteredAdapter, champion: RegisteredAdapter | None) -> None:
        now = self.version(adapter.name, adapter.version)
        now_champion = self.find_if_any(adapter.name, CHAMPION)
        before = (adapter.aliases, champion and champion.version)
        if (now.aliases, now_champion and now_champion.version) != before:
            raise TrackingError(
                f"{adapter.name}: got aliases that another promotion or registration has moved meanwhile, expected "
                f"version {adapter.version} and the champion as they were. Nothing was changed; run it again."
            )

    def _keep_decision(self, adapter: RegisteredAdapter, decision: str) -> None:
        name = f"promotions/{adapter.name}-v{adapter.version}.json"
        self._connection.call("log a decision", self._connection.client.log_text, adapter.run_id, decision, name)
        self._set_tag(adapter, DECISION_TAG, decision)

    def _set_tag(self, adapter: RegisteredAdapter, key: str, value: str) -> None:
        ((name, text),) = as_tags({key: value}).items()
        client = self._connection.client
        self._connection.call(
            "tag a model version", client.set_model_version_tag, adapter.name, str(adapter.version), name, text
        )

    def _set_alias(self, name: str, alias: str, version: int) -> None:
        client = self._connection.client
        self._connection.call("set an alias", client.set_registered_model_alias, name, alias, str(version))

    def _versions(self, name: str) -> list[ModelVersion]:
        client = self._connection.client
        return list(self._connection.call("list model versions", client.search_model_versions, f"name='{name}'"))


def check_alias(alias: str) -> None:
    """Refuse aliases that MLflow reserves, and look-alikes of ours.

    Raises:
        TrackingError: the alias cannot be used.
    """
    lower = alias.lower()
    is_reserved = lower == "latest" or re.fullmatch(r"v?\d+", lower)
    is_look_alike = lower in (CHAMPION, CHALLENGER) and alias != lower
    if is_reserved or is_look_alike or not re.fullmatch(NAME_PATTERN, alias):
        raise TrackingError(
            f"alias {alias!r}: expected a name that is neither `latest` nor a version number, such as `{CHAMPION}` "
            "(lower case)"
        )


def _check_name(name: str) -> None:
    if not re.fullmatch(NAME_PATTERN, name):
        raise TrackingError(
            f"registered model {name!r}: expected 1 to 64 letters, digits, '.', '_' or '-'. Set `registry_name`."
        )


def _registered(version: ModelVersion) -> RegisteredAdapter:
    return RegisteredAdapter(
        name=version.name,
        version=int(version.version),
        aliases=tuple(sorted(version.aliases)),
        run_id=version.run_id or "",
        tags=dict(version.tags),
    )
