//! Events in the system's journal, with their fields, so that `journalctl HEARTH_DISK=vm1` finds them.
//!
//! The journal takes entries as datagrams on a socket: lines of `FIELD=value`, and for values of several
//! lines the field's name, the length as eight bytes, and the value. A journal that does not take one at
//! once is not waited for; the event is in the daemon's own file.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use crate::Record;

/// Where the journal listens.
pub const SOCKET: &str = "/run/systemd/journal/socket";

/// A way to the journal.
#[derive(Debug)]
pub struct Journal(UnixDatagram);

fn field(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        out.push(b'\n');
        out.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        out.push(b'=');
    }
    out.extend_from_slice(value.as_bytes());
    out.push(b'\n');
}

/// An entry of the journal.
pub fn entry(record: &Record) -> Vec<u8> {
    let mut out = Vec::new();
    let disk = record.disk.as_deref();
    let message = disk.map_or_else(|| record.text.clone(), |d| format!("{d}: {}", record.text));
    field(&mut out, "MESSAGE", &message);
    field(
        &mut out,
        "PRIORITY",
        &record.severity.priority().to_string(),
    );
    field(&mut out, "SYSLOG_IDENTIFIER", "hearth");
    field(&mut out, "HEARTH_EVENT", &record.event);
    field(&mut out, "HEARTH_EVENT_ID", &record.id.to_string());
    if let Some(disk) = disk {
        field(&mut out, "HEARTH_DISK", disk);
    }
    for (name, value) in &record.details {
        let value = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        field(&mut out, &format!("HEARTH_{}", name.to_uppercase()), &value);
    }
    out
}

impl Journal {
    /// The way to the journal that listens at `socket`.
    pub fn connect(socket: &Path) -> io::Result<Journal> {
        let way = UnixDatagram::unbound()?;
        way.connect(socket)?;
        way.set_nonblocking(true)?;
        Ok(Journal(way))
    }

    /// Gives it an event.
    pub fn send(&self, record: &Record) -> io::Result<()> {
        self.0.send(&entry(record)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Severity;

    #[test]
    fn an_entry_has_the_events_fields() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let listening = UnixDatagram::bind(&path).unwrap();
        let mut details = serde_json::Map::new();
        details.insert("why".to_owned(), "one\ntwo".into());
        details.insert("count".to_owned(), 3.into());
        let record = Record {
            id: 7,
            at: 1,
            event: "disk-waiting".to_owned(),
            severity: Severity::Warning,
            disk: Some("vm1".to_owned()),
            text: "waiting".to_owned(),
            details,
        };
        Journal::connect(&path).unwrap().send(&record).unwrap();
        let mut bytes = [0; 1024];
        let n = listening.recv(&mut bytes).unwrap();
        let mut expected = b"MESSAGE=vm1: waiting\nPRIORITY=4\nSYSLOG_IDENTIFIER=hearth\n\
            HEARTH_EVENT=disk-waiting\nHEARTH_EVENT_ID=7\nHEARTH_DISK=vm1\nHEARTH_COUNT=3\nHEARTH_WHY\n"
            .to_vec();
        expected.extend_from_slice(&[7, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(b"one\ntwo\n");
        assert_eq!(bytes[..n], expected[..]);
    }
}
