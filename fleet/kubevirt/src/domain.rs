//! Adds vGPUs to a libvirt domain.
//!
//! libvirt has no vfio-user device, so the device is specified by QEMU arguments, which libvirt passes to QEMU
//! unchanged. Guest memory must be shared, because the daemon maps it through a file descriptor from QEMU.

use std::borrow::Cow;

use quick_xml::events::attributes::Attribute;
use quick_xml::events::{BytesEnd, BytesStart, Event};
use quick_xml::{Reader, Writer, XmlVersion};

/// Maximum size of a document in bytes.
pub const MAX_DOCUMENT: usize = 4 << 20;
/// Maximum depth of nested elements.
const MAX_DEPTH: usize = 64;
/// XML namespace of the arguments that libvirt passes to QEMU.
const NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Reason why vGPUs cannot be added to a document.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum DomainError {
    #[error("a domain of {0} bytes, expected at most {MAX_DOCUMENT}")]
    Long(usize),
    #[error("the domain is not XML: {0}")]
    Xml(String),
    #[error("the root is <{0}>, expected <domain>")]
    Root(String),
    #[error("elements deeper than {MAX_DEPTH}")]
    Deep,
    #[error("the prefix `qemu` stands for {0}, expected {NAMESPACE}")]
    Prefix(String),
    #[error("the domain's end tag is missing")]
    Cut,
}

fn xml(error: impl std::fmt::Display) -> DomainError {
    DomainError::Xml(error.to_string())
}

/// Returns the domain `document` with shared memory and the additional QEMU devices `devices`. Each device is the value
/// of a `-device` argument.
///
/// Does not add a device that the document already contains.
///
/// # Errors
/// Returns an error if the document is not a valid domain.
pub fn with_devices(document: &[u8], devices: &[String]) -> Result<Vec<u8>, DomainError> {
    if document.len() > MAX_DOCUMENT {
        return Err(DomainError::Long(document.len()));
    }
    if devices.is_empty() {
        return Ok(document.to_vec());
    }
    let mut reader = Reader::from_reader(document);
    reader.config_mut().expand_empty_elements = false;
    let mut edit =
        Edit { out: Writer::new(Vec::new()), path: Vec::new(), missing: devices.to_vec(), ..Edit::default() };
    loop {
        match reader.read_event().map_err(xml)? {
            Event::Eof if edit.ended => return Ok(edit.out.into_inner()),
            Event::Eof => return Err(DomainError::Cut),
            Event::Start(start) => edit.start(start, false)?,
            Event::Empty(start) => edit.start(start, true)?,
            Event::End(end) => edit.end(end)?,
            other if edit.dropped.is_none() => edit.write(other)?,
            _ => {}
        }
    }
}

/// The document under construction.
struct Edit {
    out: Writer<Vec<u8>>,
    /// Names of the open elements.
    path: Vec<String>,
    /// Depth of the element that is being omitted.
    dropped: Option<usize>,
    /// Devices that the document does not contain.
    missing: Vec<String>,
    memory: bool,
    arguments: bool,
    ended: bool,
}

impl Default for Edit {
    fn default() -> Self {
        Self {
            out: Writer::new(Vec::new()),
            path: Vec::new(),
            dropped: None,
            missing: Vec::new(),
            memory: false,
            arguments: false,
            ended: false,
        }
    }
}

impl Edit {
    fn write(&mut self, event: Event<'_>) -> Result<(), DomainError> {
        self.out.write_event(event).map_err(xml)
    }

    /// Returns true if `names` are the names of the open elements.
    fn within(&self, names: &[&str]) -> bool {
        self.path.len() == names.len() && self.path.iter().zip(names).all(|(open, name)| open == name)
    }

    fn start(&mut self, start: BytesStart<'_>, empty: bool) -> Result<(), DomainError> {
        if self.path.len() >= MAX_DEPTH {
            return Err(DomainError::Deep);
        }
        let name = start.name().as_ref().to_owned();
        let replaced = self.within(&["domain", "memoryBacking"]) && (name == "source" || name == "access");
        if self.dropped.is_none() && replaced && !empty {
            self.dropped = Some(self.path.len());
        }
        if !empty {
            self.path.push(name.clone());
        }
        if self.dropped.is_some() || replaced {
            return Ok(());
        }
        let mut start = start.into_owned();
        if self.path.first().unwrap_or(&name) != "domain" {
            return Err(DomainError::Root(name));
        }
        let parents = if empty { self.path.as_slice() } else { &self.path[..self.path.len() - 1] };
        let parents: Vec<&str> = parents.iter().map(String::as_str).collect();
        match (parents.as_slice(), name.as_str()) {
            ([], _) => start = root(&start)?,
            (["domain", "cpu", "numa"], "cell") => start = cell(&start)?,
            (["domain", "qemu:commandline"], "qemu:arg") => {
                for attribute in start.attributes() {
                    let value = value(&attribute.map_err(xml)?)?;
                    self.missing.retain(|device| *device != value);
                }
            }
            _ => {}
        }
        if !empty {
            return self.write(Event::Start(start));
        }
        match (parents.as_slice(), name.as_str()) {
            // An empty element needs an end tag once it gets contents.
            ([], "domain") | (["domain"], "memoryBacking" | "qemu:commandline") => {
                let end = start.to_end().into_owned();
                self.write(Event::Start(start))?;
                self.path.push(name);
                self.end(end)
            }
            _ => self.write(Event::Empty(start)),
        }
    }

    fn end(&mut self, end: BytesEnd<'_>) -> Result<(), DomainError> {
        if let Some(depth) = self.dropped {
            self.path.pop();
            if self.path.len() == depth {
                self.dropped = None;
            }
            return Ok(());
        }
        if self.within(&["domain", "memoryBacking"]) {
            self.memory()?;
        } else if self.within(&["domain", "qemu:commandline"]) {
            self.arguments()?;
        } else if self.within(&["domain"]) {
            if !self.memory {
                self.write(Event::Start(BytesStart::new("memoryBacking")))?;
                self.memory()?;
                self.write(Event::End(BytesEnd::new("memoryBacking")))?;
            }
            if !self.arguments {
                self.write(Event::Start(BytesStart::new("qemu:commandline")))?;
                self.arguments()?;
                self.write(Event::End(BytesEnd::new("qemu:commandline")))?;
            }
            self.ended = true;
        }
        self.path.pop();
        self.write(Event::End(end))
    }

    /// Writes the elements that specify the memory's source and access mode.
    fn memory(&mut self) -> Result<(), DomainError> {
        self.memory = true;
        self.write(Event::Empty(BytesStart::new("source").with_attributes([("type", "memfd")])))?;
        self.write(Event::Empty(BytesStart::new("access").with_attributes([("mode", "shared")])))
    }

    /// Writes the missing devices.
    fn arguments(&mut self) -> Result<(), DomainError> {
        self.arguments = true;
        for device in std::mem::take(&mut self.missing) {
            for value in ["-device", &device] {
                self.write(Event::Empty(BytesStart::new("qemu:arg").with_attributes([("value", value)])))?;
            }
        }
        Ok(())
    }
}

/// Returns the value of an attribute.
fn value(attribute: &Attribute<'_>) -> Result<String, DomainError> {
    attribute.normalized_value(XmlVersion::Implicit1_0).map(Cow::into_owned).map_err(xml)
}

/// Returns the root element with the namespace of QEMU's arguments added.
fn root(start: &BytesStart<'_>) -> Result<BytesStart<'static>, DomainError> {
    let mut root = start.to_owned();
    let there = start.try_get_attribute("xmlns:qemu").map_err(xml)?;
    match there.as_ref().map(value).transpose()? {
        None => root.push_attribute(("xmlns:qemu", NAMESPACE)),
        Some(uri) if uri == NAMESPACE => {}
        Some(uri) => return Err(DomainError::Prefix(uri)),
    }
    Ok(root)
}

/// Returns a NUMA cell element with shared memory access.
fn cell(start: &BytesStart<'_>) -> Result<BytesStart<'static>, DomainError> {
    let attributes: Vec<Attribute<'_>> = start.attributes().collect::<Result<_, _>>().map_err(xml)?;
    let kept = attributes.into_iter().filter(|attribute| attribute.key.as_ref() != "memAccess");
    let mut cell = start.to_owned();
    cell.clear_attributes();
    cell.extend_attributes(kept);
    cell.push_attribute(("memAccess", "shared"));
    Ok(cell)
}

#[cfg(test)]
mod tests;
