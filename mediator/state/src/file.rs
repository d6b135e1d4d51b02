//! Reads and writes a file that contains all parts.

use crate::{SavedCard, SavedTenancy, SavedVm};
use channels::SavedChannels;
use devmodel::SavedVGpu;
use pv::SavedTables;
use saved_state::{Known, Part, ReadError, SavedState, WriteError, Writer};
use shadow_pt::SavedSpaces;
use vram::{SavedBalancer, SavedChunks, SavedPool, TenantId};

/// Owner number of the card's own parts.
const CARD: u32 = 0;
/// Owner number of the mediator's pages, which no VM uses.
const MEDIATOR_OWNER: u32 = TenantId::MEDIATOR.0;

impl SavedCard {
    /// Returns the supported parts and their versions.
    #[must_use]
    pub fn known() -> Vec<Known> {
        let mut known = vec![
            Known::for_part::<SavedChunks>(),
            Known::for_part::<SavedBalancer>(),
            Known::for_part::<SavedChannels>(),
            Known::for_part::<SavedPool>(),
            Known::for_part::<SavedVGpu>(),
            Known::for_part::<SavedSpaces>(),
            Known::for_part::<SavedTables>(),
        ];
        known.extend(SavedTenancy::known());
        known
    }

    /// Appends all parts, except for the shared segments' pages, to a file.
    ///
    /// # Errors
    /// Returns a [`WriteError`] if the parts cannot be written.
    pub fn write(&self, file: &mut Writer) -> Result<(), WriteError> {
        let Self { chunks, balancer, tenancy, channels, pool, segments: _, vms } = self;
        file.put(CARD, chunks)?;
        file.put(CARD, balancer)?;
        tenancy.write(file, CARD)?;
        file.put(CARD, channels)?;
        file.put(MEDIATOR_OWNER, pool)?;
        for SavedVm { vm, gpu, spaces, tables, pool } in vms {
            file.put(vm.0, gpu)?;
            file.put(vm.0, spaces)?;
            file.put(vm.0, pool)?;
            if let Some(tables) = tables {
                file.put(vm.0, tables)?;
            }
        }
        Ok(())
    }

    /// Reads all parts, except for the shared segments' pages, from a file.
    ///
    /// # Errors
    /// Returns a [`ReadError`] if the parts cannot be read.
    pub fn read(file: &mut SavedState<'_>) -> Result<Self, ReadError> {
        let (chunks, balancer, tenancy) = (file.take(CARD)?, file.take(CARD)?, SavedTenancy::read(file, CARD)?);
        let (channels, pool) = (file.take(CARD)?, file.take(MEDIATOR_OWNER)?);
        let mut vms = Vec::new();
        for vm in file.owners::<SavedVGpu>() {
            let (gpu, spaces, pool) = (file.take(vm)?, file.take(vm)?, file.take(vm)?);
            let tables = if has::<SavedTables>(file, vm) { Some(file.take(vm)?) } else { None };
            vms.push(SavedVm { vm: TenantId(vm), gpu, spaces, tables, pool });
        }
        Ok(Self { chunks, balancer, tenancy, channels, pool, segments: Vec::new(), vms })
    }
}

fn has<P: Part>(file: &SavedState<'_>, of: u32) -> bool {
    file.owners::<P>().contains(&of)
}
