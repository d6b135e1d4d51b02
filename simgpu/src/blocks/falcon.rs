//! The copy engines' falcons. The model does not execute their firmware: starting a falcon after the firmware upload
//! enables its engine, and the model reports method errors as nouveau's firmware does.
//!
//! Both blocks have the same layout, 0x1000 bytes apart, so the first block's offsets apply to both.

use crate::cx::Cx;
use crate::falcon::{CodeMemory, DataMemory, SavedCode, SavedMemory};
use crate::faults::EngineId;
use crate::fifo::Fifo;
use crate::fifo::decoder::Method;
use nvspec::class::ce90b5::error;
use nvspec::regs::ce0::{self, CPU_CONTROL, INTR, INTR_DISPATCH, INTR_EN, Reg, SCRATCH};
use nvspec::regs::ce1;
use saved_state::Invalid;
use simgpu_engines::engines::EngineError;

/// Stride between the register blocks of the two falcons, in bytes.
const STRIDE: u32 = ce1::BASE - ce0::BASE;

/// Falcon interrupt lines that the firmware routes to the host.
const ROUTED: u32 = 0xfff3;

#[derive(Debug)]
pub(crate) struct CopyFalcons {
    data: [DataMemory; 2],
    code: [CodeMemory; 2],
}

const IDS: [EngineId; 2] = [EngineId::Copy0, EngineId::Copy1];

impl CopyFalcons {
    pub(crate) fn new() -> Self {
        Self { data: [DataMemory::new(), DataMemory::new()], code: [CodeMemory::new(), CodeMemory::new()] }
    }

    pub(crate) fn save(&self) -> ([SavedMemory; 2], [SavedCode; 2]) {
        let Self { data, code } = self;
        (data.each_ref().map(DataMemory::save), code.each_ref().map(CodeMemory::save))
    }

    pub(crate) fn restore(&mut self, data: [SavedMemory; 2], code: [SavedCode; 2]) -> Result<(), Invalid> {
        let ([first, second], [one, two]) = (data, code);
        self.data = [DataMemory::restored(first)?, DataMemory::restored(second)?];
        self.code = [CodeMemory::restored(one)?, CodeMemory::restored(two)?];
        Ok(())
    }

    /// Reads a register. `offset` is the register's BAR0 offset, in the block of copy engine `unit`.
    pub(crate) fn read(&mut self, unit: usize, reg: Reg, offset: u32, fifo: &Fifo, cx: &Cx) -> u32 {
        match reg {
            Reg::DMEM_CONTROL => self.data[unit].control(),
            Reg::DMEM_DATA => self.data[unit].read(),
            Reg::IMEM_CONTROL => self.code[unit].control(),
            Reg::IMEM_TAG => self.code[unit].tag(),
            // The uploaded code is discarded.
            Reg::IMEM_DATA => 0,
            Reg::CHANNEL_CURRENT => fifo.slots[IDS[unit].index()].resident.map_or(0, |resident| {
                ce0::CHANNEL_CURRENT::VALID.encode(1)
                    | ce0::CHANNEL_CURRENT::ADDRESS.encode((resident.instance.1 >> 12) as u32)
            }),
            Reg::INTR_SET
            | Reg::INTR_CLEAR
            | Reg::INTR
            | Reg::INTR_MODE
            | Reg::INTR_EN_SET
            | Reg::INTR_EN_CLEAR
            | Reg::INTR_EN
            | Reg::INTR_DISPATCH
            | Reg::SCRATCH
            | Reg::ITFEN
            | Reg::IDLE_STATE
            | Reg::CHANNEL_NEXT
            | Reg::CHANNEL_COMMAND
            | Reg::METHOD
            | Reg::UNIT
            | Reg::CPU_CONTROL
            | Reg::BOOT_VECTOR
            | Reg::HWCFG
            | Reg::DMA_CONTROL
            | Reg::DMA_BASE
            | Reg::VERSION => cx.storage.read(reg.info(), offset),
        }
    }

    pub(crate) fn write(&mut self, unit: usize, reg: Reg, offset: u32, value: u32, fifo: &mut Fifo, cx: &mut Cx) {
        let at = |register: u32| register + STRIDE * unit as u32;
        let change = |cx: &mut Cx, register: u32, change: &dyn Fn(u32) -> u32| {
            cx.storage.poke(at(register), change(cx.storage.peek(at(register))));
        };
        match reg {
            Reg::DMEM_CONTROL => self.data[unit].set_control(value),
            Reg::DMEM_DATA => self.data[unit].write(value),
            Reg::IMEM_CONTROL => self.code[unit].set_control(value),
            Reg::IMEM_TAG => self.code[unit].set_tag(value),
            Reg::IMEM_DATA => self.code[unit].write(value),
            Reg::INTR_SET => change(cx, INTR::OFFSET, &|old| old | value),
            Reg::INTR_CLEAR => {
                change(cx, INTR::OFFSET, &|old| old & !value);
                if value & error::INTR != 0 {
                    fifo.slot(IDS[unit]).resume();
                    fifo.retry_waiting();
                }
            }
            Reg::INTR_EN_SET => change(cx, INTR_EN::OFFSET, &|old| old | value),
            Reg::INTR_EN_CLEAR => change(cx, INTR_EN::OFFSET, &|old| old & !value),
            Reg::CPU_CONTROL => {
                cx.storage.poke(offset, value);
                let vector = cx.storage.peek(at(ce0::BOOT_VECTOR::OFFSET));
                if CPU_CONTROL::START.is_set(value) && self.code[unit].begins_at(vector) {
                    cx.storage.poke(at(INTR_DISPATCH::OFFSET), ROUTED);
                    change(cx, INTR_EN::OFFSET, &|old| old | error::INTR);
                    fifo.slot(IDS[unit]).start();
                    fifo.retry_waiting();
                }
            }
            Reg::INTR
            | Reg::INTR_MODE
            | Reg::INTR_EN
            | Reg::INTR_DISPATCH
            | Reg::SCRATCH
            | Reg::ITFEN
            | Reg::IDLE_STATE
            | Reg::CHANNEL_CURRENT
            | Reg::CHANNEL_NEXT
            | Reg::CHANNEL_COMMAND
            | Reg::METHOD
            | Reg::UNIT
            | Reg::BOOT_VECTOR
            | Reg::HWCFG
            | Reg::DMA_CONTROL
            | Reg::DMA_BASE
            | Reg::VERSION => cx.storage.write(reg.info(), offset, value),
        }
    }

    pub(crate) fn reset(&mut self, unit: usize, cx: &mut Cx) {
        self.data[unit] = DataMemory::new();
        self.code[unit] = CodeMemory::new();
        let base = ce0::BASE + STRIDE * unit as u32;
        cx.storage.reset_range(base, base + STRIDE);
    }
}

/// Returns true if a falcon asserts its interrupt line to PMC.
pub(crate) fn asserts(unit: u32, cx: &Cx) -> bool {
    let word = |register: u32| cx.storage.peek(register + STRIDE * unit);
    let dispatch = word(INTR_DISPATCH::OFFSET);
    word(INTR::OFFSET) & word(INTR_EN::OFFSET) & dispatch & !(dispatch >> 16) != 0
}

/// Raises a copy engine's interrupt for a method that failed.
pub(crate) fn trap(unit: u32, cause: EngineError, method: Method, cx: &mut Cx) {
    let code = match cause {
        EngineError::Data(code) => code,
        EngineError::IllegalMethod
        | EngineError::IllegalClass
        | EngineError::Fault(_)
        | EngineError::ShaderFault(_)
        | EngineError::Warp(_) => error::ILLEGAL_METHOD,
    };
    let at = |register: u32| register + STRIDE * unit;
    let word = error::SUBCHANNEL.encode(u32::from(method.subchannel))
        | error::METHOD.encode(method.address >> 2)
        | error::CODE.encode(code);
    cx.storage.poke(at(SCRATCH::at(0)), word);
    cx.storage.poke(at(SCRATCH::at(1)), method.data);
    cx.storage.poke(at(INTR::OFFSET), cx.storage.peek(at(INTR::OFFSET)) | error::INTR);
    tracing::debug!(unit, error = %cause, method = method.address, data = method.data, "copy engine trap");
}
