//! The first bytes of a packet, and what greetings say.

use super::{FormatError, HEADER, Reader};

const MAGIC: u8 = 0xe7;
const ACK_NOW: u8 = 0x80;
const PATIENT: u8 = 0x40;

/// How soon the sender of a packet wants it acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Haste {
    /// At once: it waits for that.
    Now,
    /// With a few others.
    Soon,
    /// With many others: they are a small part of what it may have on its way.
    Patient,
}

/// What a packet is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Initiator: I want a connection.
    Hello,
    /// Responder: you have it.
    Welcome,
    /// Responder: I speak none of your versions.
    Versions,
    /// Frames of an open connection.
    Data,
}

/// The first 24 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Version of the protocol.
    pub version: u8,
    /// What follows.
    pub kind: Kind,
    /// Haste of its acknowledgement.
    pub haste: Haste,
    /// Place of the source port in the sender's list.
    pub path: u8,
    /// The receiver's number of the connection; 0 in a hello.
    pub connection: u32,
    /// Low bits of the packet number.
    pub number: u32,
    /// Microseconds of the sender's clock.
    pub stamp: u32,
    /// Keyed hash of all else.
    pub tag: u64,
}

impl Header {
    /// Writes it before the frames. `false`: `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> bool {
        let Some(bytes) = out.first_chunk_mut::<HEADER>() else {
            return false;
        };
        let kind = match self.kind {
            Kind::Hello => 1,
            Kind::Welcome => 2,
            Kind::Versions => 3,
            Kind::Data => 4,
        };
        let haste = match self.haste {
            Haste::Now => ACK_NOW,
            Haste::Soon => 0,
            Haste::Patient => PATIENT,
        };
        // In whole words: who reads them soon, for the tag, would wait for all stores if they were smaller.
        let first = u32::from_le_bytes([MAGIC, self.version, kind | haste, self.path]);
        let first = u64::from(first) | u64::from(self.connection) << 32;
        let second = u64::from(self.number) | u64::from(self.stamp) << 32;
        bytes[..8].copy_from_slice(&first.to_le_bytes());
        bytes[8..16].copy_from_slice(&second.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tag.to_le_bytes());
        true
    }

    /// The header of these bytes, and what follows it.
    ///
    /// # Errors
    /// [`FormatError`] where [`Header::emit`] would not have written them. The version is not judged:
    /// greetings of others must be understood.
    #[inline(always)]
    pub fn parse(packet: &[u8]) -> Result<(Header, &[u8]), FormatError> {
        let mut reader = Reader(packet);
        let magic = reader.u8("header")?;
        if magic != MAGIC {
            return Err(FormatError::Magic(magic));
        }
        let version = reader.u8("header")?;
        let kind = reader.u8("header")?;
        let header = Header {
            version,
            kind: match kind & !(ACK_NOW | PATIENT) {
                1 => Kind::Hello,
                2 => Kind::Welcome,
                3 => Kind::Versions,
                4 => Kind::Data,
                other => return Err(FormatError::Kind(other)),
            },
            haste: match kind & (ACK_NOW | PATIENT) {
                0 => Haste::Soon,
                ACK_NOW => Haste::Now,
                PATIENT => Haste::Patient,
                _ => return Err(FormatError::Kind(kind)),
            },
            path: reader.u8("header")?,
            connection: reader.u32("header")?,
            number: reader.u32("header")?,
            stamp: reader.u32("header")?,
            tag: u64::from_le_bytes(reader.array("header")?),
        };
        Ok((header, reader.0))
    }
}

/// What the two ends say before there is a connection. All kinds of greeting have all fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// The initiator's random number.
    pub initiator: u64,
    /// The responder's; 0 in a hello.
    pub responder: u64,
    /// What the other side must write into its packets.
    pub connection: u32,
    /// Oldest version that the speaker speaks (in a welcome: the chosen one).
    pub oldest: u8,
    /// Newest one.
    pub newest: u8,
}

/// Bytes of a greeting, after the header.
pub const GREETING: usize = 22;

impl Greeting {
    /// Writes it. `false`: `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> bool {
        let Some(bytes) = out.first_chunk_mut::<GREETING>() else {
            return false;
        };
        bytes[0..8].copy_from_slice(&self.initiator.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.responder.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.connection.to_le_bytes());
        bytes[20] = self.oldest;
        bytes[21] = self.newest;
        true
    }

    /// The greeting that these bytes start with; later versions may say more.
    ///
    /// # Errors
    /// [`FormatError::Short`].
    pub fn parse(bytes: &[u8]) -> Result<Greeting, FormatError> {
        let mut reader = Reader(bytes);
        Ok(Greeting {
            initiator: u64::from_le_bytes(reader.array("greeting")?),
            responder: u64::from_le_bytes(reader.array("greeting")?),
            connection: reader.u32("greeting")?,
            oldest: reader.u8("greeting")?,
            newest: reader.u8("greeting")?,
        })
    }
}
