// SPDX-License-Identifier: GPL-2.0-only OR MIT
// The runlist of Linux 6.1.
// kernel: 6.1
// file: nvkm/engine/fifo/gf100.c
// hook: gmpv_nv_runlist_commit

@@
@@
 #include "changf100.h"
+#include "gmpv/hooks.h"

@@
identifier fifo;
statement S, S1;
@@
 gf100_fifo_runlist_commit(struct gf100_fifo *fifo)
 {
 ... when != S
+	if (gmpv_nv_runlist_commit(fifo))
+		return;
 S1
 ... when any
 }
