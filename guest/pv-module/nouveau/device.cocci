// SPDX-License-Identifier: GPL-2.0-only OR MIT
// Finds the interface before any part of the device is initialized, and releases it while BAR0 is still mapped.
// file: nvkm/engine/device/base.c
// hook: gmpv_nv_device_init
// hook: gmpv_nv_device_del

@@
@@
 #include <core/option.h>
+#include "gmpv/hooks.h"

@@
identifier device, ret;
@@
 nvkm_device_init(struct nvkm_device *device)
 {
 ...
+	ret = gmpv_nv_device_init(device);
+	if (ret)
+		return ret;
	ret = nvkm_device_preinit(device);
 ...
 }

@@
identifier device;
@@
 nvkm_device_del(...)
 {
 <...
+		gmpv_nv_device_del(device);
		if (device->pri)
			iounmap(device->pri);
 ...>
 }
