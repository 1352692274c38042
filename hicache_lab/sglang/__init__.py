"""What an SGLang release is given and what it does: releases, launch lines, argument resolution, source reader."""
