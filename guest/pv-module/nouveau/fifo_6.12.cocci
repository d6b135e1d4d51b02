// SPDX-License-Identifier: GPL-2.0-only OR MIT
// Channels and the runlist since Linux 6.2. Writes of recovery and preemption still go to the registers.
// kernel: 6.12
// file: nvkm/engine/fifo/gf100.c
// hook: gmpv_nv_channel_bind
// hook: gmpv_nv_channel_unbind
// hook: gmpv_nv_channel_enable
// hook: gmpv_nv_channel_disable
// hook: gmpv_nv_runl_update
// hook: gmpv_nv_runl_ended

@@
@@
 #include "runq.h"
+#include "gmpv/hooks.h"

@@
@@
 gf100_chan_bind(...)
 {
 <...
+	if (!gmpv_nv_channel_bind(device, chan->id, chan->inst->addr))
	nvkm_wr32(device, 0x003000 + (chan->id * 8), 0xc0000000 | chan->inst->addr >> 12);
 ...>
 }

@@
@@
 gf100_chan_unbind(...)
 {
 <...
+	if (!gmpv_nv_channel_unbind(device, chan->id))
	nvkm_wr32(device, 0x003000 + (chan->id * 8), 0x00000000);
 ...>
 }

@@
@@
 gf100_chan_start(...)
 {
 <...
+	if (!gmpv_nv_channel_enable(device, chan->id))
	nvkm_wr32(device, 0x003004 + (chan->id * 8), 0x001f0001);
 ...>
 }

@@
@@
 gf100_chan_stop(...)
 {
 <...
+	if (!gmpv_nv_channel_disable(device, chan->id))
	nvkm_mask(device, 0x003004 + (chan->id * 8), 0x00000001, 0x00000000);
 ...>
 }

@@
@@
 struct nvkm_runl_func gf100_runl = {
-	.update = nv50_runl_update,
+	.update = gmpv_nv_runl_update,
 };

@@
identifier runl;
statement S, S1;
@@
 gf100_runl_pending(struct nvkm_runl *runl)
 {
 ... when != S
+	if (gmpv_nv_runl_ended(runl))
+		return false;
 S1
 ... when any
 }
