//! The daemon's backends for the devices of the crates `vgpu` and `passthrough`, with their status for the admin API.

use api::{Denied, Driver};
use passthrough::PassthroughVm;
use vgpu::MediatedVm;
use vm_device::{DeniedAccess, DeviceError, DeviceStatus, InterruptKind};
use vram::TenantId;

use super::backend::{BackendError, BackendStatus, VmBackend};

impl From<DeviceStatus> for BackendStatus {
    fn from(status: DeviceStatus) -> Self {
        let DeviceStatus { vram_mib, channels_used, pci_id, bus_master, interrupts, denied, counters } = status;
        let (vendor, device) = pci_id;
        let interrupts = match interrupts {
            InterruptKind::Off => api::InterruptKind::Off,
            InterruptKind::Intx => api::InterruptKind::Intx,
            InterruptKind::Msi => api::InterruptKind::Msi,
        };
        let driver = Driver { pci_id: format!("{vendor:04x}:{device:04x}"), bus_master, interrupts, state: None };
        Self {
            vram_mib,
            channels_used,
            driver,
            denied: denied.into_iter().map(denied_access).collect(),
            counters,
            programs: Vec::new(),
        }
    }
}

fn denied_access(access: DeniedAccess) -> Denied {
    let DeniedAccess { place, offset, reason, reads, writes } = access;
    Denied { place, offset, reason, reads, writes }
}

impl From<DeviceError> for BackendError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Shortage(shortage) => Self::lacking(shortage),
            other => Self::failed(other),
        }
    }
}

impl VmBackend for MediatedVm {
    fn status(&self) -> BackendStatus {
        Self::status(self).into()
    }

    fn scheduled_as(&self) -> Option<TenantId> {
        Some(self.id())
    }

    fn mediated(&self) -> Option<&MediatedVm> {
        Some(self)
    }

    #[cfg(test)]
    fn while_locked(&self, act: &mut (dyn FnMut() + Send)) {
        Self::while_locked(self, act);
    }

    fn release(&self) -> Result<(), BackendError> {
        Self::release(self).map_err(BackendError::failed)
    }
}

impl VmBackend for PassthroughVm {
    fn status(&self) -> BackendStatus {
        Self::status(self).into()
    }
}
