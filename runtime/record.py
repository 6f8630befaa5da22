"""The base of everything that is written to a package as data."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of everything that is written to a package: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
