"""What is shown to people and programs is typed and described, whole, and does not change."""

from pydantic import BaseModel, ConfigDict


class Shown(BaseModel):
    """Base of what is shown to people and programs."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
