//! Methods that the host unit executes itself, on any subchannel (class 0x906f).

use super::Fifo;
use super::context::Context;
use super::decoder::Method;
use super::pbdma::Outcome;
use super::slot::{self, Done};
use crate::cx::Cx;
use crate::faults::EngineId;
use nvspec::Field;
use nvspec::addr::GpuVa;
use nvspec::fifo::{engine, host_method as host};
use nvspec::regs::pbdma::INTR_0;
use simgpu_engines::engines::semaphore::{self, Acquire, Form};
use simgpu_memory::mmu::{Access, Flush};

/// Operations of [`host::MEM_OP_B`]. Source: NVIDIA's class header for 0x906f.
mod mem_op {
    use super::Field;
    pub(super) const OPERATION: Field = Field::new(31, 27);
    pub(super) const SYSMEMBAR_FLUSH: u32 = 5;
    pub(super) const SOFT_FLUSH: u32 = 6;
    pub(super) const TLB_INVALIDATE: u32 = 9;
}

const DONE: Outcome = Outcome::Done(Done { ns: 0, non_stall: false, released: false });

impl Fifo {
    /// Executes a method below [`host::ENGINE_FIRST`].
    pub(super) fn host_method(&mut self, index: usize, context: &mut Context, method: Method, cx: &mut Cx) -> Outcome {
        let data = method.data;
        match method.address {
            host::SET_OBJECT => self.set_object(index, context, method, cx),
            host::NOP | host::MEM_OP_A => DONE,
            host::FB_FLUSH => {
                cx.memory.push_posted();
                DONE
            }
            host::SEMAPHORE_A => remember(context, 0, data),
            host::SEMAPHORE_B => remember(context, 1, data),
            host::SEMAPHORE_C => remember(context, 2, data),
            host::SEMAPHORE_D => self.semaphore(index, context, method, cx),
            host::NON_STALL_INTERRUPT => self.non_stall(context, method.subchannel, cx),
            host::MEM_OP_B => match mem_op::OPERATION.get(data) {
                mem_op::SYSMEMBAR_FLUSH | mem_op::SOFT_FLUSH => {
                    cx.memory.push_posted();
                    DONE
                }
                mem_op::TLB_INVALIDATE => {
                    // The method specifies a page directory, but it is always correct to drop all translations.
                    cx.mmu.flush(Flush::default());
                    DONE
                }
                _ => Outcome::Trap(INTR_0::METHOD_SIZE.mask()),
            },
            host::SET_REFERENCE => {
                cx.memory.push_posted();
                context.reference = data;
                context.publish(&cx.memory);
                DONE
            }
            host::YIELD => Outcome::Yield,
            // Reject unknown methods, and the push buffer checksum, which the model does not compute.
            _ => Outcome::Trap(INTR_0::METHOD_SIZE.mask()),
        }
    }

    fn set_object(&mut self, index: usize, context: &mut Context, method: Method, cx: &mut Cx) -> Outcome {
        let number = host::set_object::ENGINE.get(method.data);
        let class = host::set_object::CLASS.get(method.data);
        let subchannel = usize::from(method.subchannel & 7);
        if number == engine::SOFTWARE {
            // This is a software object: the PBDMA passes every method, including this one, to the driver. The driver
            // executes the method and makes the PBDMA skip it.
            let bound = context.objects[subchannel] == method.data;
            context.objects[subchannel] = method.data;
            return if bound { DONE } else { Outcome::Trap(INTR_0::EMPTY_SUBC.mask()) };
        }
        let Some(id) = slot::by_number(number) else {
            return Outcome::Trap(INTR_0::DEVICE.mask());
        };
        // GUESS: binding a class that the engine supports affects only the host unit, and does not load a context.
        // Linux 6.12 binds an object, removes the engine's context, and only then lets the card process the bind.
        if self.slot(id).class_supported(class) {
            context.objects[subchannel] = method.data;
            return DONE;
        }
        if let Some(not_now) = self.use_engine(index, context, id, cx) {
            return not_now;
        }
        context.objects[subchannel] = method.data;
        self.illegal_class(id, class, method, cx);
        Outcome::EngineFault
    }

    fn semaphore(&mut self, index: usize, context: &mut Context, method: Method, cx: &mut Cx) -> Outcome {
        use host::semaphore_d as d;
        let [high, low, payload, _] = context.semaphore;
        let va = GpuVa(u64::from(high & 0xff) << 32 | u64::from(low & !3));
        let data = method.data;
        let stamp = self.stamp(index, cx);
        let operation = d::OPERATION.get(data);
        let mut session = cx.mmu.session(&cx.memory, &context.space, Access::USER);
        if operation == d::RELEASE {
            if !d::RELEASE_WFI_DISABLE.is_set(data) {
                session.push_posted();
            }
            let form = if d::RELEASE_SIZE_4.is_set(data) { Form::OneWord } else { Form::FourWords };
            let result = semaphore::release(&mut session, va, payload, form, stamp);
            drop(session);
            return match result {
                Ok(()) => {
                    context.semaphore[3] = data;
                    self.retry_waiting();
                    DONE
                }
                Err(fault) => Outcome::HostFault(fault),
            };
        }
        let Some(how) = Acquire::from_operation(operation) else {
            return Outcome::Trap(INTR_0::SEMAPHORE.mask());
        };
        match semaphore::acquired(&mut session, va, payload, how) {
            Ok(true) => {
                context.semaphore[3] = data;
                DONE
            }
            Ok(false) => Outcome::NotAcquired(d::ACQUIRE_SWITCH.is_set(data)),
            Err(fault) => Outcome::HostFault(fault),
        }
    }

    /// Raises the non-stall interrupt of the engine to which the subchannel's object belongs or, without an object, of
    /// the engine that the channel used last.
    fn non_stall(&mut self, context: &Context, subchannel: u8, cx: &mut Cx) -> Outcome {
        let object = context.objects[usize::from(subchannel & 7)];
        let id = slot::by_number(host::set_object::ENGINE.get(object))
            .filter(|_| object != 0)
            .or(context.engine)
            .unwrap_or(EngineId::Graph);
        if !cx.faults.drops_interrupt(id) {
            self.raise_non_stall(slot::number(id), cx);
        }
        DONE
    }
}

fn remember(context: &mut Context, index: usize, data: u32) -> Outcome {
    context.semaphore[index] = data;
    DONE
}
