"""Every format that is read, with the rule by which an edit of it is legal."""

from __future__ import annotations

from fuzzing import models, studies, texts, workloads
from fuzzing.property import Format

FORMATS: tuple[Format, ...] = (*models.FORMATS, *studies.FORMATS, *texts.FORMATS, *workloads.FORMATS)
