//! Functions that return properties of cards.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuDeviceComputeCapability", &[(2000, "", 12)]),
    family("cuDeviceGet", &[(2000, "", 12)]),
    family("cuDeviceGetAttribute", &[(2000, "", 12)]),
    family("cuDeviceGetByPCIBusId", &[(4010, "", 12)]),
    family("cuDeviceGetCliqueCount", &[(13040, "", 13)]),
    family("cuDeviceGetCliqueInfo", &[(13040, "", 13)]),
    family("cuDeviceGetCount", &[(2000, "", 12)]),
    family("cuDeviceGetExecAffinitySupport", &[(11040, "", 12)]),
    family("cuDeviceGetHostAtomicCapabilities", &[(13000, "", 13)]),
    family("cuDeviceGetLuid", &[(10000, "", 12)]),
    family("cuDeviceGetName", &[(2000, "", 12)]),
    family("cuDeviceGetPCIBusId", &[(4010, "", 12)]),
    family("cuDeviceGetProperties", &[(2000, "", 12)]),
    family("cuDeviceGetTexture1DLinearMaxWidth", &[(11010, "", 12)]),
    family("cuDeviceGetUuid", &[(9020, "", 12), (11040, "_v2", 12)]),
    family("cuDeviceRegisterAsyncNotification", &[(12040, "", 12)]),
    family("cuDeviceUnregisterAsyncNotification", &[(12040, "", 12)]),
];
