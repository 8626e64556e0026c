"""`python -m estimator_accum.plan`: an alias of `python -m bert_finetune.plan`."""

import sys

from bert_finetune.plan import main

if __name__ == "__main__":
    sys.exit(main())
