//! Names of functions, with one file for each class.

use crate::{Class, Family};

mod allocate;
mod array;
mod capture;
mod context;
mod copy;
mod device;
mod event;
mod free;
mod graph;
mod host;
mod information;
mod init;
mod interop;
mod mapping;
mod module;
mod pointer;
mod pool;
mod share;
mod stream;
mod submit;
mod texture;
mod tool;

pub(super) const CLASSES: &[(Class, &[Family])] = &[
    (Class::Allocate, allocate::FAMILIES),
    (Class::Array, array::FAMILIES),
    (Class::Capture, capture::FAMILIES),
    (Class::Context, context::FAMILIES),
    (Class::Copy, copy::FAMILIES),
    (Class::Device, device::FAMILIES),
    (Class::Event, event::FAMILIES),
    (Class::Free, free::FAMILIES),
    (Class::Graph, graph::FAMILIES),
    (Class::Host, host::FAMILIES),
    (Class::Information, information::FAMILIES),
    (Class::Init, init::FAMILIES),
    (Class::Interop, interop::FAMILIES),
    (Class::Module, module::FAMILIES),
    (Class::Pointer, pointer::FAMILIES),
    (Class::Pool, pool::FAMILIES),
    (Class::Share, share::FAMILIES),
    (Class::Stream, stream::FAMILIES),
    (Class::Submit, submit::FAMILIES),
    (Class::Texture, texture::FAMILIES),
    (Class::Tool, tool::FAMILIES),
    (Class::Virtual, mapping::FAMILIES),
];
