"""eaglet: from prompts to a trained, measured EAGLE-3 drafter, token for token.

The map.  Each stage has a rule file of its own in rules/ and a program of the same name in scripts/:

    target → prompts → (serve) generate → validate → merge → hidden_states → train → evaluate → audit

Beside them, when asked for: export (formats of other trainers), learning_curve (would more rows help?).

`snakemake` runs all of it, `snakemake data` stops at the shards, `snakemake drafter` at the drafter, `snakemake check` checks the
config and shows what was learned about the target's turns.  `--configfile FILE` replaces config/config.yaml as a whole.
"""

from snakemake.utils import min_version

min_version("9.27")

if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "rules/common.smk"
include: "rules/target.smk"
include: "rules/prompts.smk"
include: "rules/serve.smk"
include: "rules/generate.smk"
include: "rules/validate.smk"
include: "rules/merge.smk"
include: "rules/hidden_states.smk"
include: "rules/train.smk"
include: "rules/evaluate.smk"
include: "rules/audit.smk"
include: "rules/export.smk"
include: "rules/learning_curve.smk"


localrules:
    all,
    data,
    drafter,
    check,
    export,


report: "docs/workflow.rst"


rule all:
    default_target: True
    input:
        results("audit/report.html"),


rule data:
    input:
        results("shards/manifest.json"),


rule drafter:
    input:
        results("drafter/model.safetensors"),
        results("drafter/serve.sh"),
