"""What an SGLang release is told and what it does: releases, launch lines, argument resolution, source reader."""
