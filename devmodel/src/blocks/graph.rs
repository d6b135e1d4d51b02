//! High-level model of PGRAPH and its two context-switching falcons. Firmware uploads are only stored, commands return
//! the same results as nouveau's built-in firmware, and the mediator manages contexts.

use super::falcon::{Dmem, Imem};
use super::{At, Backlog, Cx};
use crate::denied::Reason;
use crate::events::{GraphError, SmError};
use nvspec::falcon::Falcon;
use nvspec::regs::fecs::{self, COMMAND_DATA, CPU_CONTROL, CURRENT, INTR_SET, MAILBOX, UNITS};
use nvspec::regs::fecs_command;
use nvspec::regs::pgraph::{self, PWR_HANDSHAKE, TRAPPED_ADDRESS};
use nvspec::regs::{gpc_units, gpccs, sm_trap};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

const MAILBOXES: usize = MAILBOX::COUNT as usize;

/// State of FECS: its memories and mailboxes, the data of the next command, and the current and next contexts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Fecs {
    running: bool,
    dmem: Dmem,
    imem: Imem,
    mailbox: [u32; MAILBOXES],
    command_data: u32,
    current: u32,
    next: u32,
}

/// Interrupt registers of the front end, and the state of the falcons.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Graph {
    intr: u32,
    intr_en: u32,
    trap: u32,
    trap_gpcs: u32,
    code: u32,
    trapped_address: u32,
    trapped_data: u32,
    classes: [u32; 8],
    backlog: Backlog<GraphError>,
    fecs: Fecs,
    gpccs: Dmem,
    gpccs_imem: Imem,
}

impl Graph {
    pub(crate) fn read(&mut self, reg: pgraph::Reg, at: At, cx: &Cx) -> u32 {
        use pgraph::Reg;
        match reg {
            Reg::INTR => self.intr,
            Reg::INTR_EN => self.intr_en,
            Reg::TRAP => self.trap,
            Reg::TRAP_GPCS => self.trap_gpcs,
            Reg::DATA_ERROR => self.code,
            Reg::TRAPPED_ADDRESS => self.trapped_address,
            Reg::TRAPPED_DATA_LO => self.trapped_data,
            Reg::SUBCHANNEL_CLASS => self.classes.get(at.index()).copied().unwrap_or(0),
            _ => cx.plain_read(at),
        }
    }

    pub(crate) fn write(&mut self, reg: pgraph::Reg, at: At, value: u32, cx: &mut Cx) {
        use pgraph::Reg;
        match reg {
            Reg::INTR => {
                self.intr &= !value;
                if self.intr == 0
                    && let Some(next) = self.backlog.take(|_| true)
                {
                    self.show(&next, cx);
                }
            }
            Reg::INTR_EN => self.intr_en = value,
            Reg::TRAP => self.trap &= !value,
            Reg::TRAP_GPCS => self.trap_gpcs &= !value,
            Reg::DATA_ERROR => self.code = value,
            // The units are always idle, so the handshake completes immediately.
            Reg::PWR_HANDSHAKE => cx.storage.set(at.offset, value & !PWR_HANDSHAKE::BUSY.mask()),
            Reg::TRAPPED_ADDRESS | Reg::TRAPPED_DATA_LO | Reg::SUBCHANNEL_CLASS => {}
            _ => cx.plain_write(at, value),
        }
    }

    pub(crate) fn read_fecs(&mut self, reg: fecs::Reg, at: At, cx: &Cx) -> u32 {
        use fecs::Reg;
        let hub = &mut self.fecs;
        match reg {
            Reg::DMEM_CONTROL => hub.dmem.control(0),
            Reg::DMEM_DATA => hub.dmem.read(0),
            Reg::IMEM_CONTROL => hub.imem.control(),
            Reg::COMMAND_DATA => hub.command_data,
            Reg::UNITS => UNITS::ROPS.encode(cx.config.chip.rops) | UNITS::GPCS.encode(cx.config.chip.gpcs),
            Reg::MAILBOX => hub.mailbox.get(at.index()).copied().unwrap_or(0),
            Reg::CURRENT => hub.current,
            Reg::NEXT => hub.next,
            Reg::COMMAND | Reg::INTR_SET | Reg::MAILBOX_SET | Reg::MAILBOX_CLEAR => 0,
            _ => cx.plain_read(at),
        }
    }

    pub(crate) fn write_fecs(&mut self, reg: fecs::Reg, at: At, value: u32, cx: &mut Cx) {
        use fecs::Reg;
        let hub = &mut self.fecs;
        match reg {
            Reg::DMEM_CONTROL => hub.dmem.set_control(0, value),
            Reg::DMEM_DATA => hub.dmem.write(0, value),
            Reg::IMEM_CONTROL => hub.imem.set_control(value),
            Reg::IMEM_DATA => hub.imem.write(value),
            Reg::COMMAND_DATA => hub.command_data = value,
            Reg::COMMAND => hub.command(at, value, cx),
            Reg::MAILBOX | Reg::MAILBOX_SET | Reg::MAILBOX_CLEAR => {
                if let Some(mailbox) = hub.mailbox.get_mut(at.index()) {
                    *mailbox = match reg {
                        Reg::MAILBOX => value,
                        Reg::MAILBOX_SET => *mailbox | value,
                        _ => *mailbox & !value,
                    };
                }
            }
            Reg::CURRENT => hub.current = value,
            Reg::NEXT => hub.next = value,
            Reg::INTR_SET => {
                if hub.running && INTR_SET::CONTEXT.is_set(value) {
                    hub.current = hub.next;
                }
            }
            Reg::CPU_CONTROL => {
                cx.plain_write(at, value);
                if CPU_CONTROL::START.is_set(value) {
                    hub.start(cx.config.chip.graph_context_bytes);
                    // FECS's firmware starts GPCCS's firmware.
                    cx.backend.firmware_started(Falcon::Fecs, hub.imem.dwords(), hub.dmem.dwords());
                    cx.backend.firmware_started(Falcon::Gpccs, self.gpccs_imem.dwords(), self.gpccs.dwords());
                }
            }
            Reg::UNITS => {}
            _ => cx.plain_write(at, value),
        }
    }

    pub(crate) fn read_gpccs(&mut self, reg: gpccs::Reg, at: At, cx: &Cx) -> u32 {
        match reg {
            gpccs::Reg::DMEM_CONTROL => self.gpccs.control(0),
            gpccs::Reg::DMEM_DATA => self.gpccs.read(0),
            gpccs::Reg::IMEM_CONTROL => self.gpccs_imem.control(),
            _ => cx.plain_read(at),
        }
    }

    pub(crate) fn write_gpccs(&mut self, reg: gpccs::Reg, at: At, value: u32, cx: &mut Cx) {
        match reg {
            gpccs::Reg::DMEM_CONTROL => self.gpccs.set_control(0, value),
            gpccs::Reg::DMEM_DATA => self.gpccs.write(0, value),
            gpccs::Reg::IMEM_CONTROL => self.gpccs_imem.set_control(value),
            gpccs::Reg::IMEM_DATA => self.gpccs_imem.write(value),
            _ => cx.plain_write(at, value),
        }
    }

    pub(crate) fn reset(&mut self) {
        let dropped = self.backlog.dropped;
        *self = Self::default();
        self.backlog.dropped = dropped;
    }

    /// Validates restored state.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        self.backlog.check(|_| true)?;
        self.fecs.dmem.check()?;
        self.fecs.imem.check()?;
        self.gpccs.check()?;
        self.gpccs_imem.check()
    }

    /// Shows an error in the registers, or queues it until the guest has acknowledged the visible error.
    pub(crate) fn error(&mut self, error: GraphError, cx: &mut Cx) {
        if self.intr == 0 {
            self.show(&error, cx);
        } else {
            self.backlog.push(error);
        }
    }

    pub(crate) fn pending(&self) -> bool {
        self.intr & self.intr_en != 0
    }

    /// Returns true if the firmware has been started.
    #[must_use]
    pub fn firmware_running(&self) -> bool {
        self.fecs.running
    }

    /// Returns the value of the current context register.
    #[must_use]
    pub fn current(&self) -> u32 {
        self.fecs.current
    }

    #[expect(clippy::cast_possible_truncation, reason = "the register contains a 28-bit page number")]
    fn show(&mut self, error: &GraphError, cx: &mut Cx) {
        self.intr |= error.intr;
        self.trap |= error.trap;
        if let Some(sm) = &error.sm {
            self.trap_gpcs |= show_sm(sm, cx);
        }
        self.code = error.code;
        self.trapped_address =
            TRAPPED_ADDRESS::SUBCHANNEL.encode(error.subchannel) | (error.method & TRAPPED_ADDRESS::METHOD.mask());
        self.trapped_data = error.data;
        if let Some(class) = self.classes.get_mut(error.subchannel as usize) {
            *class = error.class;
        }
        if let Some(instance) = error.instance {
            // Drivers identify the faulting channel by PGRAPH's current context.
            self.fecs.current = CURRENT::VALID.mask() | CURRENT::ADDRESS.encode((instance.address() >> 12) as u32);
        }
    }
}

/// Stores a multiprocessor error in the registers of its GPC, and returns the GPC's bit.
fn show_sm(error: &SmError, cx: &mut Cx) -> u32 {
    let chip = &cx.config.chip;
    let gpc = if error.gpc < chip.gpcs { error.gpc } else { 0 };
    let tpc = if error.tpc < chip.tpcs_per_gpc { error.tpc } else { 0 };
    let mut set = |at: u32, bits: u32| cx.storage.set(at, cx.storage.get(at) | bits);
    set(sm_trap::gpc(gpc), sm_trap::TPC_MASK.encode(1 << tpc));
    set(sm_trap::tpc(gpc, tpc), sm_trap::SM.mask());
    set(sm_trap::global_error(gpc, tpc), error.global);
    cx.storage.set(sm_trap::warp_error(gpc, tpc), error.warp);
    1 << gpc
}

impl Fecs {
    fn start(&mut self, context_bytes: u32) {
        self.running = true;
        let [ready, size, ..] = &mut self.mailbox;
        *ready |= MAILBOX::READY.mask();
        *size = context_bytes;
    }

    fn command(&mut self, at: At, value: u32, cx: &mut Cx) {
        let known = matches!(value, fecs_command::SET_CHANNEL | fecs_command::SAVE_CONTEXT);
        if !known {
            cx.deny_write(at, Reason::Unsupported, value);
            return;
        }
        if !self.running {
            return;
        }
        if value == fecs_command::SET_CHANNEL {
            let valid = COMMAND_DATA::VALID.is_set(self.command_data);
            let page = COMMAND_DATA::ADDRESS.get(self.command_data);
            if valid && cx.instance(at, self.command_data, 0, page).is_none() {
                return;
            }
            self.current = self.command_data & (CURRENT::VALID.mask() | CURRENT::ADDRESS.mask());
        }
        let [ready, ..] = &mut self.mailbox;
        *ready |= MAILBOX::READY.mask();
    }
}

/// Returns the number of TPCs of a GPC, or 0 if the GPC does not exist.
pub(crate) fn read_gpc_units(_: gpc_units::Reg, at: At, cx: &Cx) -> u32 {
    if at.index < cx.config.chip.gpcs { gpc_units::TPC_COUNT::TPCS.encode(cx.config.chip.tpcs_per_gpc) } else { 0 }
}
