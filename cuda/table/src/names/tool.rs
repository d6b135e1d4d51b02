//! Functions for profilers, core dumps, checkpoints, and logs.

use crate::{Family, family};

pub(super) const FAMILIES: &[Family] = &[
    family("cuCheckpointOperationComplete", &[(13040, "", 13)]),
    family("cuCheckpointProcessCheckpoint", &[(12080, "", 12)]),
    family("cuCheckpointProcessGetRestoreThreadId", &[(12080, "", 12)]),
    family("cuCheckpointProcessGetState", &[(12080, "", 12)]),
    family("cuCheckpointProcessLock", &[(12080, "", 12)]),
    family("cuCheckpointProcessRestore", &[(12080, "", 12)]),
    family("cuCheckpointProcessUnlock", &[(12080, "", 12)]),
    family("cuCoredumpDeregisterCompleteCallback", &[(13020, "", 13)]),
    family("cuCoredumpDeregisterStartCallback", &[(13020, "", 13)]),
    family("cuCoredumpGetAttribute", &[(12010, "", 12)]),
    family("cuCoredumpGetAttributeGlobal", &[(12010, "", 12)]),
    family("cuCoredumpRegisterCompleteCallback", &[(13020, "", 13)]),
    family("cuCoredumpRegisterStartCallback", &[(13020, "", 13)]),
    family("cuCoredumpSetAttribute", &[(12010, "", 12)]),
    family("cuCoredumpSetAttributeGlobal", &[(12010, "", 12)]),
    family("cuFlushGPUDirectRDMAWrites", &[(11030, "", 12)]),
    family("cuLogsCurrent", &[(12090, "", 12)]),
    family("cuLogsDumpToFile", &[(12090, "", 12)]),
    family("cuLogsDumpToMemory", &[(12090, "", 12)]),
    family("cuLogsRegisterCallback", &[(12090, "", 12)]),
    family("cuLogsUnregisterCallback", &[(12090, "", 12)]),
    family("cuProfilerInitialize", &[(4000, "", 12)]),
    family("cuProfilerStart", &[(4000, "", 12)]),
    family("cuProfilerStop", &[(4000, "", 12)]),
];
