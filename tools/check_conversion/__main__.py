import sys

from check_conversion.command import main

sys.exit(main())
