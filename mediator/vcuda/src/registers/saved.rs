//! Saves and restores the registers.

use saved_state::Invalid;
use serde::{Deserialize, Serialize};

use super::{NO_VECTOR, QUEUE_SIZES, QUEUES, QueueRegisters, Registers, Setup, VECTORS, vector};

/// Saved registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedRegisters {
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    config_vector: u16,
    status: u8,
    isr: u8,
    queue_select: u16,
    queues: Vec<SavedQueue>,
    table: Vec<u8>,
    is_resetting: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedQueue {
    size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    vector: u16,
    enabled: bool,
}

impl Registers {
    /// Saves the registers.
    pub(crate) fn save(&self) -> SavedRegisters {
        let Self {
            device_feature_select,
            driver_feature_select,
            driver_features,
            config_vector,
            status,
            isr,
            queue_select,
            queues,
            table,
            is_resetting,
        } = *self;
        let queue = |queue| {
            let QueueRegisters { setup: Setup { size, descriptors, available, used }, vector, enabled } = queue;
            SavedQueue { size, descriptors, available, used, vector, enabled }
        };
        SavedRegisters {
            device_feature_select,
            driver_feature_select,
            driver_features,
            config_vector,
            status,
            isr,
            queue_select,
            queues: queues.into_iter().map(queue).collect(),
            table: table.to_vec(),
            is_resetting,
        }
    }

    /// Restores saved registers.
    ///
    /// # Errors
    /// Returns an error if a register has an invalid value.
    pub(crate) fn restored(saved: SavedRegisters) -> Result<Self, Invalid> {
        let SavedRegisters {
            device_feature_select,
            driver_feature_select,
            driver_features,
            config_vector,
            status,
            isr,
            queue_select,
            queues,
            table,
            is_resetting,
        } = saved;
        let impossible = || "a register has an invalid value".to_owned();
        let is_vector = |value: u16| value == NO_VECTOR || vector(value) == value;
        let fits = |(queue, most): (&SavedQueue, u16)| {
            queue.size.is_power_of_two() && queue.size <= most && is_vector(queue.vector)
        };
        let all_fit = queues.iter().zip(QUEUE_SIZES).all(fits) && is_vector(config_vector);
        Invalid::unless(all_fit && queues.len() == QUEUES, impossible)?;
        let table: [u8; VECTORS as usize * 16] = table.try_into().map_err(|_| Invalid::new(impossible()))?;
        let queue = |queue: SavedQueue| {
            let SavedQueue { size, descriptors, available, used, vector, enabled } = queue;
            QueueRegisters { setup: Setup { size, descriptors, available, used }, vector, enabled }
        };
        let queues: Vec<_> = queues.into_iter().map(queue).collect();
        let queues = queues.try_into().map_err(|_| Invalid::new(impossible()))?;
        Ok(Self {
            device_feature_select,
            driver_feature_select,
            driver_features,
            config_vector,
            status,
            isr,
            queue_select,
            queues,
            table,
            is_resetting,
        })
    }
}
